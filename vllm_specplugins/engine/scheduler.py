"""Defines the plugin's schedulers, which choose the number of tokens that a step drafts per request, from measured
times and accepted tokens of steps (gate/step_times.py). The number is the same for all requests. Only the scheduler's
process chooses it, so ranks cannot differ.

All of them count the tokens that requests emit. A request may end within a draft, at an end token or by an abort. The
worker then has counted the rest of the draft as accepted, but vLLM's scheduler drops it. The scheduler therefore
corrects the metrics reports, and sends the totals to the worker for its logs. It subtracts a dropped token from the
stage with the largest count at that position.
"""

from collections import Counter
from collections.abc import Set
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.engine.messages import Emitted, StepNews, facts_of, news_of
from vllm_specplugins.engine.metrics.names import REPORT, SEPARATOR, key
from vllm_specplugins.engine.metrics.steps import StepWatch
from vllm_specplugins.engine.room import LimitsMasks, MakesRoom
from vllm_specplugins.engine.switch import Switched
from vllm_specplugins.gate.common_length import CommonLength, fill_a_graph
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to
from vllm_specplugins.request_options import draft_limit

_BY_POSITION = "num_accepted_tokens_per_pos"


class CountsEmitted(Switched, MakesRoom):
    """A mixin for vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_steps, self._dropped = 0, Counter[int]()  # request steps without first tokens; tokens by position
        self._num_reported, self._to_report = 0, Counter[int]()
        self._watch = StepWatch()
        self._sent = self._emitted = Emitted()  # the totals sent to the worker, and the current totals

    def add_request(self, request: Any) -> None:
        if request.resumable:  # other requests use vLLM's method
            self._update_request_with_output = self._update_session
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        num_sampled = list(map(len, model_runner_output.sampled_token_ids))  # vLLM truncates the lists
        lengths = news_of(scheduler_output).verifies, facts_of(model_runner_output).num_verified
        self._watch.add(scheduler_output, model_runner_output, num_sampled, *lengths)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if sum(num_sampled) > self.count(outputs):
            self._drop(outputs, model_runner_output.req_id_to_index, num_sampled)
        self.correct_report(model_runner_output)
        rests = self.is_off and news_of(scheduler_output).is_off
        if rests or not self.requests:
            self._watch.pause()
        self.is_over(news_of(scheduler_output))
        return outputs

    def count(self, outputs: Any) -> int:
        """Counts the request steps of a step, and returns the number of its tokens."""
        num_emitted = 0
        for engine_outputs in outputs.values():
            for core_output in engine_outputs.outputs:
                if core_output.new_token_ids:
                    num_emitted += len(core_output.new_token_ids)
                    self._num_steps += core_output.prefill_stats is None
        if self._num_steps != self._emitted.num_steps:
            self._emitted = Emitted(self._num_steps, self._emitted.dropped)
        return num_emitted

    def _drop(self, outputs: Any, rows: dict[str, int], num_sampled: list[int]) -> None:
        all_outputs = (core_output for engine_outputs in outputs.values() for core_output in engine_outputs.outputs)
        emitted = {core_output.request_id: len(core_output.new_token_ids) for core_output in all_outputs}
        for request_id, row in rows.items():
            positions = range(max(1, emitted.get(request_id, 0)) - 1, num_sampled[row] - 1)
            self._dropped.update(positions)
            self._to_report.update(positions)
        dropped = tuple(self._dropped[position] for position in range(1 + max(self._dropped, default=-1)))
        if dropped != self._emitted.dropped:
            self._emitted = Emitted(self._num_steps, dropped)

    def correct_report(self, model_runner_output: Any) -> None:
        """Corrects the worker's report, if this output has one."""
        sent = model_runner_output.ec_connector_output
        if sent is not None and sent.ec_connector_stats and REPORT in sent.ec_connector_stats.data:
            self._correct(sent.ec_connector_stats.data[REPORT])

    def _correct(self, report: dict[str, Any]) -> None:
        """Subtracts the dropped tokens that the report contains; counts from the device arrive later."""
        report[key("steps")] = self._num_steps - self._num_reported
        self._num_reported = self._num_steps
        for position in list(self._to_report):
            all_series = (series for series in report if series.startswith(_BY_POSITION + SEPARATOR))
            matches = [series for series in all_series if series.endswith(f"{SEPARATOR}{position}")]
            for series in sorted(matches, key=report.__getitem__, reverse=True):
                num = min(report[series], self._to_report[position])
                report[series] -= num
                if num:
                    report[key("num_accepted_tokens", series.split(SEPARATOR)[1])] -= num
                self._to_report[position] -= num
        self._to_report = +self._to_report

    def _update_session(self, request: Any, new_token_ids: list[int], *is_stale: Any, **kw: Any) -> Any:
        """Continues a session after its last emitted token; vLLM's synchronous scheduler would also count dropped
        tokens."""
        session, num_sampled = request, len(new_token_ids)
        result = super()._update_request_with_output(request, new_token_ids, *is_stale, **kw)  # type: ignore[misc]
        if session.resumable and not session.num_output_placeholders:
            session.num_computed_tokens -= num_sampled - len(result[0])
        return result

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        self.send_totals(news_of(scheduler_output))

    def send_totals(self, news: StepNews) -> None:
        news.emitted = self._sent = self._emitted
        news.sums = self._watch.taken()

    def has_finished_requests(self) -> bool:
        """Returns True also until the worker has received the last totals, which takes an empty step with asynchronous
        scheduling."""
        return self._sent is not self._emitted or super().has_finished_requests()  # type: ignore[misc]


class StepLengths(CommonLength):
    """vLLM's `dynamic_sd_lookup`, which reads steps from vLLM's objects."""

    def tell(self, scheduled: Any, output: Any) -> None:
        step_ms, counts, drafts = self.step_ms(), scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        length = scheduled.num_spec_tokens_to_schedule
        if length != news_of(scheduled).verifies:
            return
        num_reqs, share, emitted = len(counts), 1.0, output.sampled_token_ids
        total, num_drafts = scheduled.total_num_scheduled_tokens, sum(map(len, drafts.values()))
        if total > num_reqs + num_drafts:  # the step also read prompts
            num_reqs, verified = len(drafts) or list(counts.values()).count(1), facts_of(output).num_verified
            verified = num_drafts if verified is None else min(verified, num_drafts)
            share = (num_reqs + verified) / (total - num_drafts + verified)
            emitted = [emitted[output.req_id_to_index[request_id]] for request_id in drafts]
        self.add(num_reqs, length, length, step_ms, list(map(len, emitted)), share)


class _Choosing(LimitsMasks, CountsEmitted):
    dynamic_sd_lookup: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._lengths: StepLengths | None = None
        self._drafted = self.num_spec_tokens  # in the last step that was planned
        self._scheduled: Set[str] = set()  # the requests of that step
        config: Any = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        if config.plan.scheduler_chooses:
            times = self._times(trims=bool(config.enable_adaptive_verification))
            lengths = StepLengths(times, step_tokens=self.max_num_scheduled_tokens)
            self.dynamic_sd_lookup = self._lengths = lengths

    def _times(self, trims: bool) -> StepTimes:
        config: Any = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        max_num_draft, chain = self.num_spec_tokens, config.plugin_config.longest_chain
        return StepTimes(lengths_up_to(max_num_draft, chain), 0 < chain < max_num_draft, trims)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._lengths is not None:
            self._lengths.tell(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._lengths is not None and (self.is_off or not self.requests):
            self._lengths.pause()
        return outputs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        limit, drafts = self.draft_limit, scheduler_output.scheduled_spec_decode_tokens
        room = self.max_num_scheduled_tokens - scheduler_output.total_num_scheduled_tokens
        if limit == room == 0 and self._lengths is not None:  # prompts probably also fill the next step
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)
        verifies: int | None = self._drafted
        if limit is not None or not drafts.keys() <= self._scheduled:  # some are shorter, or older than the last step
            verifies = None if drafts else 0
        news_of(scheduler_output).verifies = verifies
        self._drafted = scheduler_output.num_spec_tokens_to_schedule
        self._scheduled = scheduler_output.num_scheduled_tokens.keys()


class ChoosingScheduler(_Choosing, Scheduler):
    """vLLM's synchronous scheduler, which knows the drafts."""


class PlannedScheduler(_Choosing, AsyncScheduler):
    """vLLM's AsyncScheduler, for Model Runner V2: it plans a step before its drafts exist. If drafts are trimmed on
    the device, it plans K tokens, otherwise the length of the request's last known draft, which the worker reports.
    In its first two steps, a request's options set the length; from then on, a request without a match costs one token
    instead of K + 1."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._planned: dict[str, int] = {}
        config = self.vllm_config.speculative_config.plugin_config
        # Drafts that branch are verified as a whole, since they are not trimmed.
        self._plans_whole, self._num_beside = config.longest_chain > 0, config.length - config.longest_path
        has_graphs = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        self._has_graphs = has_graphs and not self._plans_whole
        self._has_options = False  # whether a live request has options

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._has_options |= bool(self._limits_of(request).options)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        lengths = facts_of(model_runner_output).num_draft
        if lengths is not None and scheduler_output.num_spec_tokens_to_schedule:  # otherwise the step drafted nothing
            if self._lengths is not None and self._lengths.times.trims:  # the worker cannot trim
                self._lengths.times = self._times(trims=False)
            self._planned.update(lengths.items())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if len(self._planned) > 2 * len(self.requests) + 64:
            self._planned = {key: n for key, n in self._planned.items() if key in self.requests}
        self._has_options &= bool(self.requests)
        return outputs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if not (self._drafted and (self._planned or self._has_options or self._plans_whole)):
            return
        requests = [self.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        lengths = [self._allowed(request) if request.spec_token_ids else 0 for request in requests]
        if any(lengths) and self._has_graphs and self._fill_a_graph(requests):
            return
        for request, length in zip(requests, lengths, strict=True):
            request.spec_token_ids = request.spec_token_ids[:length]

    def _fill_a_graph(self, requests: list[Any]) -> bool:
        """Returns whether all K tokens of each request are planned."""
        max_num_draft = self.num_spec_tokens
        return fill_a_graph(len(requests), max_num_draft) and all(
            len(request.spec_token_ids) == max_num_draft == self._limit(request) and not request.use_structured_output
            for request in requests
        )

    def _allowed(self, request: Any) -> int:
        limit, planned = self._limit(request), self._planned.get(request.request_id)
        return limit if planned is None else min(planned, limit)

    def _limit(self, request: Any) -> int:
        limits = self._limits_of(request)  # the step that was just scheduled emits at least one token
        return draft_limit(limits.options, request.num_tokens, self.num_spec_tokens, limits.length_limit - 1)

    def _limits_of(self, request: Any) -> RequestLimits:
        """Returns the limits of the request's current turn, since a session's limits change."""
        limits = request.num_prompt_tokens, self.max_model_len, self._num_beside
        return RequestLimits.of(request.sampling_params, *limits)
