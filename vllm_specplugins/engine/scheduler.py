"""Defines the plugin's schedulers, which choose the number of tokens that a step drafts per request, from measured
times and accepted tokens of steps (gate/step_times.py). The number is the same for all requests. Only the scheduler's
process chooses it, so ranks cannot differ."""

from collections.abc import Set
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specplugins.engine.emitted import CountsEmitted
from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.engine.masks import LimitsMasks
from vllm_specplugins.engine.messages import facts_of, news_of
from vllm_specplugins.gate.common_length import CommonLength, fill_a_graph
from vllm_specplugins.request_options import draft_limit


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
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        if config.speculative_config.plan.scheduler_chooses:
            speculative_config, cliff = config.speculative_config, config.compilation_config.max_cudagraph_capture_size
            shape = {"longest_chain": speculative_config.plugin_config.longest_chain, "cliff": cliff or 0}
            trims = bool(speculative_config.enable_adaptive_verification)
            shape |= {"trims": trims, "step_tokens": self.max_num_scheduled_tokens}
            self.dynamic_sd_lookup = self._lengths = StepLengths(self.num_spec_tokens, **shape)

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
    From its third step on, a request without a match costs one token instead of K + 1; before, its options set the
    length."""

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
            if self._lengths is not None and not self._planned:  # the worker cannot trim
                self._lengths.times.expect(trims=False)
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
