"""The scheduler of both model runners: it chooses the number of tokens that a step drafts per request, from measured
times and accepted tokens of steps (gate/step_times.py). The number is the same for all requests. Only the scheduler's
process chooses it, so ranks cannot differ."""

from collections.abc import Set
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specplugins.engine.emitted import CountsEmitted
from vllm_specplugins.engine.masks import LimitsMasks
from vllm_specplugins.engine.messages import facts_of, news_of
from vllm_specplugins.gate.common_length import CommonLength


class StepLengths(CommonLength):
    """vLLM's `dynamic_sd_lookup`, which reads steps from vLLM's objects."""

    def tell(self, scheduled: Any, output: Any) -> None:
        step_ms, counts, drafts = self.step_ms(), scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        length = scheduled.num_spec_tokens_to_schedule
        if length != news_of(scheduled).verifies:
            return
        num_reqs, share, emitted = len(counts), 1.0, output.sampled_token_ids
        total, num_drafts = scheduled.total_num_scheduled_tokens, sum(map(len, drafts.values()))
        if total > num_reqs + num_drafts:  # the step read prompts, too
            num_reqs, verified = len(drafts) or list(counts.values()).count(1), facts_of(output).num_verified
            verified = num_drafts if verified is None else min(verified, num_drafts)
            share = (num_reqs + verified) / (total - num_drafts + verified)
            emitted = [emitted[output.req_id_to_index[request_id]] for request_id in drafts]
        self.add(num_reqs, length, length, step_ms, list(map(len, emitted)), share)


class Choosing(LimitsMasks, CountsEmitted):
    """A mixin for vLLM's schedulers."""

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
            shape |= {"trims": trims, "max_tokens": self.max_num_scheduled_tokens}
            self.dynamic_sd_lookup = self._lengths = StepLengths(self.num_spec_tokens, **shape)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._lengths is not None:
            self._lengths.tell(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._lengths is not None and not self.requests:
            self._lengths.pause()
        return outputs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        limit, drafts = self.draft_limit, scheduler_output.scheduled_spec_decode_tokens
        room = self.max_num_scheduled_tokens - scheduler_output.total_num_scheduled_tokens
        if limit == room == 0 and self._lengths is not None:  # prompts are likely to fill the next step, too
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)
        verifies: int | None = self._drafted
        if limit is not None or not drafts.keys() <= self._scheduled:  # some are shorter, or older than the last step
            verifies = None if drafts else 0
        news_of(scheduler_output).verifies = verifies
        self._drafted = scheduler_output.num_spec_tokens_to_schedule
        self._scheduled = scheduler_output.num_scheduled_tokens.keys()


class ChoosingScheduler(Choosing, Scheduler):
    """vLLM's synchronous scheduler, which knows the drafts."""
