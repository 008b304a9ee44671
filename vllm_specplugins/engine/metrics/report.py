"""In the worker: what has been counted since the last report, on its way to the front end.

A report is a small dictionary. vLLM carries it: `ECConnectorStats` of a step's output go through the scheduler and the
front end's socket as they are. Where such a connector is configured, that way is taken and nothing is exported.
"""

import copy
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput

from vllm_specplugins.counters import Counters, StageCounters
from vllm_specplugins.engine.metrics.clock import LONGEST_LIST, DeviceClock
from vllm_specplugins.engine.metrics.names import REPORT, key
from vllm_specplugins.isolation.barrier import FaultBarrier

logger = logging.getLogger("vllm.specplugins")

SHARE = 0.005  # of the time is spent on reports, at the most
_FIELDS = {
    "asked": "asked",
    "drafts": "drafts",
    "drafted_tokens": "drafted",
    "kept_tokens": "kept",
    "verified_tokens": "verified",
    "accepted_tokens": "accepted",
}
_values_of = operator.attrgetter(*_FIELDS.values())
_STEP = "step_draft_seconds"
_LISTS = {"accepted_tokens_by_position": "accepted_at", "gate_lengths": "gate_lengths"}


class Reporter:
    """Reports of one worker.

    Args:
        barrier: holds the counters.
        method: its name.
        device: where verification runs.
        clock: seconds.
    """

    def __init__(
        self,
        barrier: FaultBarrier,
        method: str,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.verification = DeviceClock(device)
        self._barrier = barrier
        self.method = method
        self._clock = clock
        self._not_before = 0.0
        self._has_failed = False
        self._sent: dict[str, float] = {}
        self._shown: dict[str, float] = {}  # gauges
        self._ms: dict[str, float] = {}  # of drafting, by series, up to the last step
        self._observed: dict[str, list[float]] = {}  # of histograms, since the last report

    def forget(self, request_ids: Sequence[str]) -> None:
        """Notes how well requests that finished were guessed."""
        for rate in self._barrier.acceptance.take(request_ids):
            self._observe("request_acceptance_rate", rate)

    def drop(self) -> None:
        """Forgets what was counted until now, vLLM's warm-up; what there is, as of a store, is reported."""
        self._barrier.totals()
        self._report(self._barrier.totals())
        self._shown = {}

    def attach(self, output: Any, is_last: bool = False) -> Any:
        """A step's output with a report, where one is due; nothing that goes wrong here reaches a request.

        Args:
            output: ModelRunnerOutput, or what holds one that arrives later. It may be one that all steps share.
            is_last: whether no step may follow for a while.
        """
        if self._has_failed:
            return output
        try:
            return self._attached(output, is_last)
        except Exception:
            self._has_failed = True
            logger.exception("Our metrics are not reported any more; requests go on.")
            return output

    def _attached(self, output: Any, is_last: bool) -> Any:
        start = self._clock()
        is_due = is_last or start >= self._not_before
        if not is_due and self._barrier.counters.propose_ms == self._ms.get(_STEP, 0.0):  # nothing ran on the host
            return output
        counters = self._barrier.totals()
        self._time_step(counters)
        if not is_due:
            return output
        if report := self._report(counters):
            if is_last:
                output = copy.copy(output)
            carrier = getattr(output, "model_runner_output", output)
            carrier.ec_connector_output = ECConnectorOutput(ec_connector_stats=ECConnectorStats({REPORT: report}))
        end = self._clock()
        self._not_before = end + (end - start) / SHARE
        return output

    def _stages(self, counters: Counters) -> Mapping[str, StageCounters]:
        return counters.stages or {f"0 {self.method}": counters.whole}

    def _sizes(self) -> dict[str, int]:
        """Of the stages of ours that keep something; a user's code is not called from here."""
        return {
            name: stage.num_bytes()
            for name, stage in stages_of(self._barrier.proposer, self.method)
            if is_ours(stage, "num_bytes")
        }

    def _observe(self, series: str, value: float) -> None:
        values = self._observed.setdefault(series, [])
        if len(values) < LONGEST_LIST:
            values.append(value)

    def _time_step(self, counters: Counters) -> None:
        """How long this step's drafting took, by stage and altogether."""
        counters.whole.ms = counters.propose_ms
        ms_of = {stage: own.ms for stage, own in self._stages(counters).items()}
        for series, ms in (
            *((key("draft_seconds", stage), ms) for stage, ms in ms_of.items()),
            (_STEP, counters.propose_ms),
        ):
            if ms > self._ms.get(series, 0.0):
                self._observe(series, (ms - self._ms.get(series, 0.0)) / 1000)
                self._ms[series] = ms

    def _report(self, counters: Counters) -> dict[str, Any]:
        """Counters as what was added to them, gauges as they are, histograms as lists of what they shall observe."""
        self.forget(())
        totals: dict[str, float] = {}
        health: dict[str, Any] = {}
        for stage, own in self._stages(counters).items():
            totals.update(zip([key(name, stage) for name in _FIELDS], _values_of(own), strict=True))
            for name, attribute in _LISTS.items():
                for index, count in enumerate(getattr(own, attribute)):
                    totals[key(name, stage, index)] = count
            health[stage] = own if counters.stages else counters
        if counters.stages:
            health[self.method] = counters
        for length, count in enumerate(counters.draft_lengths):
            totals[key("draft_lengths", length)] = count
        gauges = {key("store_bytes", stage): float(size) for stage, size in self._sizes().items()}
        for stage, proposer in stages_of(self._barrier.proposer, self.method):
            if is_ours(proposer, "store_stats"):
                held = proposer.store_stats()
                gauges[key("stored_outputs", stage)], gauges[key("stored_tokens", stage)] = (
                    held["texts"],
                    held["tokens"],
                )
        for stage, state in health.items():
            for cause, count in state.faults.items():
                totals[key("faults", stage, cause)] = count
            totals[key("times_switched_off", stage)] = state.times_switched_off
            gauges[key("switched_off", stage)] = float(state.switched_off)
        report: dict[str, Any] = {
            # A total that is smaller than before began anew, as in a barrier that took another's place.
            series: total - sent if total > (sent := self._sent.get(series, 0)) else total
            for series, total in totals.items()
            if total != self._sent.get(series, 0)
        }
        report |= {series: value for series, value in gauges.items() if value != self._shown.get(series)}
        self._sent, self._shown = totals, gauges
        if seconds := self.verification.take():
            self._observed["verification_seconds"] = seconds
        report |= self._observed
        self._observed = {}
        return report


def stages_of(proposer: Any, method: str) -> list[tuple[str, Any]]:
    """The stages of a cascade, or the proposer that is its only one, under the names that their counters have."""
    stages: list[tuple[str, Any]] = (
        proposer.named_stages() if hasattr(proposer, "named_stages") else [(f"0 {method}", proposer)]
    )
    return stages


def is_ours(stage: Any, method: str) -> bool:
    """Whether a stage has this method and is not of a user's code."""
    return hasattr(stage, method) and type(stage).__module__.startswith("vllm_specplugins.")


def time_verification(runner: Any, clock: DeviceClock) -> None:
    """Has a runner's verification of drafts timed, steps without drafts left out."""
    if hasattr(runner, "speculator"):  # Model Runner V2
        sampler = runner.rejection_sampler
        if sampler is not None:
            kind = type(sampler)

            def verify(self: Any, *args: Any) -> Any:
                return clock.call(kind.__call__, self, *args)

            # It may be called in one place, and is read and written in others.
            sampler.__class__ = type(kind.__name__, (kind,), {"__call__": verify})
        return
    sample = runner._sample

    def timed(logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is None:
            return sample(logits, spec_decode_metadata)
        return clock.call(sample, logits, spec_decode_metadata)

    runner._sample = timed
