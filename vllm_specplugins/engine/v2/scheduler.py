"""The asynchronous scheduler of Model Runner V2. It plans a step before the step's drafts exist. If drafts are trimmed
on the device, it plans K tokens, otherwise the length of the request's last known draft, which the worker reports on
its output. From its third step on, a request without a match therefore costs one token instead of K + 1; before, its
options set the length."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.engine.messages import facts_of
from vllm_specplugins.engine.scheduler import Choosing
from vllm_specplugins.gate.common_length import fill_a_graph
from vllm_specplugins.request_options import draft_limit


class PlannedScheduler(Choosing, AsyncScheduler):
    """vLLM's AsyncScheduler with true draft lengths, one step late."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._planned: dict[str, int] = {}
        config = self.vllm_config.speculative_config.plugin_config
        # Drafts that branch are verified whole: nothing trims them later.
        self._plans_whole, self._num_branches = config.longest_chain > 0, config.num_branches
        has_graphs = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        self._has_graphs = has_graphs and not self._plans_whole
        self._has_options = False  # whether any live request was added with some

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._has_options |= bool(self._limits_of(request).options)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        lengths = facts_of(model_runner_output).num_draft
        if lengths is not None and scheduler_output.num_spec_tokens_to_schedule:  # otherwise the step did not draft
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
        """Whether all K tokens of each request are planned."""
        max_num_draft = self.num_spec_tokens
        return fill_a_graph(len(requests), max_num_draft) and all(
            len(request.spec_token_ids) == max_num_draft == self._limit(request) and not request.use_structured_output
            for request in requests
        )

    def _allowed(self, request: Any) -> int:
        limit, planned = self._limit(request), self._planned.get(request.request_id)
        return limit if planned is None else min(planned, limit)

    def _limit(self, request: Any) -> int:
        limits = self._limits_of(request)  # the step that was just scheduled emits at least one token more
        return draft_limit(limits.options, request.num_tokens, self.num_spec_tokens, limits.length_limit - 1)

    def _limits_of(self, request: Any) -> RequestLimits:
        """The limits of the request's current turn: a session's limits change."""
        limits = request.num_prompt_tokens, self.max_model_len, self._num_branches
        return RequestLimits.of(request.sampling_params, *limits)
