"""Reports the worker's counts since the last report to the front end. vLLM transports a report, a small dictionary, as
`ECConnectorStats` of a step's output. An encoder-cache connector uses that field itself, and then no metrics are
exported."""

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ECConnectorOutput

from vllm_specplugins.counters import Counters, StageCounters
from vllm_specplugins.engine.messages import StepFacts, send_facts
from vllm_specplugins.engine.metrics.names import COUNTS, GAUGES, HEALTH, REPORT, SEPARATOR, key
from vllm_specplugins.engine.metrics.steps import StepTotals
from vllm_specplugins.engine.session import Session
from vllm_specplugins.isolation.faults import cause_text
from vllm_specplugins.stage import stage_of, stages_of

logger = logging.getLogger("vllm.specplugins")

SHARE = 0.005  # limit of the share of time for reports
LONGEST_LIST = 1000  # limit of a histogram's values between reports; further values are dropped
_STEP = "step_draft_time_seconds"
Clock = Callable[[], float]
Show = Callable[[Mapping[str, Any]], None] | None


def tell_states(vllm_config: Any, kv_cache_config: Any, method: str) -> None:
    """Logs the memory of recurrent states: each layer stores one state per verified token."""
    total = drafted = 0
    for group in kv_cache_config.kv_cache_groups:
        if isinstance(mamba_spec := group.kv_cache_spec, MambaSpec):
            total += len(group.layer_names) * mamba_spec.max_memory_usage_bytes(vllm_config)
            drafted += len(group.layer_names) * mamba_spec.num_speculative_blocks * mamba_spec.page_size_bytes
    if drafted:
        logger.info(
            "%s: recurrent states take %.2f MiB per request, of which %.2f MiB are for num_speculative_tokens %d.",
            *(method, total / (1 << 20), drafted / (1 << 20), vllm_config.num_speculative_tokens),
        )


class Reporter:
    """Reports the counters of a worker's session; `show`, if given, receives the reports instead of vLLM."""

    def __init__(self, session: Session, method: str, clock: Clock = time.perf_counter, show: Show = None):
        self._session = session
        self._show = show
        self.method = method
        self._clock = clock
        self._not_before = 0.0
        self._has_failed = False
        self._sent: dict[str, float] = {}
        self._shown: dict[str, float] = {}  # gauges
        self._taken: dict[str, tuple[float, int]] = {}  # ms of drafting and wanted drafts, up to the last step
        self._observed = defaultdict[str, list[float]](list)  # of histograms, since the last report
        self.steps = StepTotals(self._observe)
        self._noted_ms = 0.0  # of drafting, up to the last step
        self.is_off = False  # whether drafting is switched off

    def forget(self, request_ids: Sequence[str]) -> None:
        """Records the acceptance rates of finished requests."""
        for rate in self._session.rates.take(request_ids):
            self._observe("request_acceptance_rate", rate)

    def note(self, carrier: Any) -> None:
        """Sends the facts of a step's drafting to the scheduler."""
        last_ms, self._noted_ms = self._noted_ms, self._session.barrier.counters.propose_ms
        facts, self._session.facts = self._session.facts, StepFacts()
        facts.draft_seconds, facts.undrafted = (self._noted_ms - last_ms) / 1000, self._session.undrafted
        send_facts(carrier, facts)

    def drop(self) -> None:
        """Drops the counts of vLLM's warm-up; gauges, such as a store's size, are still reported."""
        self._session.totals()
        self._report(self._session.totals())
        self._shown, self._noted_ms = {}, self._session.barrier.counters.propose_ms

    def is_due(self) -> bool:
        return self._clock() >= self._not_before

    def attach(self, output: Any, is_last: bool = False) -> Any:
        """Adds a report to a step's output if one is due. A failure here affects no request. All steps may share
        `output`, or it may contain an output that arrives later. With `is_last`, no step may follow for a while."""
        if self._has_failed:
            return output
        try:
            return self._attached(output, is_last)
        except Exception as error:
            self._has_failed = True
            logger.error(
                "The engine stops exporting metrics, because the worker cannot report them (%s). Requests continue.",
                cause_text(error),
            )
            return output

    def _attached(self, output: Any, is_last: bool) -> Any:
        start = self._clock()
        is_due = is_last or start >= self._not_before
        last_ms, _ = self._taken.get(_STEP, (0.0, 0))
        if not is_due and self._session.barrier.counters.propose_ms == last_ms:  # no code ran on the host
            return output
        counters = self._session.totals()
        self._time_step(counters)
        if not is_due:
            return output
        report = self._report(counters)
        if self._show is not None:
            if report:
                self._show(report)
        elif report or self.is_off:  # the scheduler adds its steps, which are all that counts then
            if is_last:
                output = copy.copy(output)
            carrier = getattr(output, "model_runner_output", output)
            carrier.ec_connector_output = ECConnectorOutput(ec_connector_stats=ECConnectorStats({REPORT: report}))
        end = self._clock()
        self._not_before = end + (end - start) / SHARE
        return output

    def _stages(self, counters: Counters) -> Mapping[str, StageCounters]:
        return counters.stages or {f"0 {self.method}": counters.whole}

    def _observe(self, series: str, value: float) -> None:
        """Adds a value to a histogram of the next report, and drops it if the list is full."""
        if len(self._observed[series]) < LONGEST_LIST:
            self._observed[series].append(value)

    def _time_step(self, counters: Counters) -> None:
        counters.whole.ms = counters.propose_ms
        stages = self._stages(counters)
        taken = {key("draft_time_seconds", stage): (counts.ms, counts.asked) for stage, counts in stages.items()}
        taken[_STEP] = counters.propose_ms, sum(counts.asked for counts in stages.values())
        for series, (ms, asked) in taken.items():
            last_ms, last_asked = self._taken.get(series, (0.0, 0))
            if ms > last_ms and asked > last_asked:
                self._observe(series, (ms - last_ms) / 1000)
        self._taken = taken

    def _report(self, counters: Counters) -> dict[str, Any]:
        """Returns counters as increments, gauges as values, histograms as lists of observations."""
        self.forget(())
        now, gauges = defaultdict[str, float](int), dict[str, float]()
        for series, value in self._values(counters):
            if series.partition(SEPARATOR)[0] in GAUGES:
                gauges[series] = max(float(value), gauges.get(series, 0.0))
            else:
                now[series] += value
        report: dict[str, Any] = {
            # A smaller total than before comes from a new session, which counts from 0.
            series: total - sent if total > (sent := self._sent.get(series, 0)) else total
            for series, total in now.items()
            if total != self._sent.get(series, 0)
        }
        report |= {series: value for series, value in gauges.items() if value != self._shown.get(series)}
        self._sent, self._shown = now, gauges
        report |= self._observed
        self._observed.clear()
        return report

    def _values(self, counters: Counters) -> Iterator[tuple[str, float]]:
        """Yields totals and gauges, without calling a user's code."""
        if self._show is not None and self._session.emitted is not None:  # this report does not pass a scheduler
            yield key("steps"), self._session.emitted.num_steps
        yield key("drafting_off"), self.is_off
        for length, count in enumerate(counters.draft_lengths):
            yield key("draft_lengths", length), count
        parts = [(stage, counts, COUNTS) for stage, counts in self._stages(counters).items()]
        whole = self.method if len(parts) > 1 else parts[0][0]
        healths: list[tuple[str, Any]] = [*counters.stages.items(), (whole, counters)]
        for stage, counts, metrics in (*parts, *((stage, counts, HEALTH) for stage, counts in healths)):
            for metric in metrics:
                value = getattr(counts, metric.field)
                if isinstance(value, dict | list):
                    for label, count in value.items() if isinstance(value, dict) else enumerate(value):
                        yield key(metric.name, stage, label), count
                else:
                    yield key(metric.name, stage), value
        for name, proposer in stages_of(self._session.barrier.proposer, f"0 {self.method}"):
            for metric_name, labels, value in stage_of(proposer).series():
                yield key(metric_name, name, *labels), value
        yield from self.steps.counts.items()
        for part, seconds in self._session.budget.costs().items() if self._session.budget else ():
            yield key("step_cost_seconds", part), seconds
