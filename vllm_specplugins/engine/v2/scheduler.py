"""Scheduler for asynchronous scheduling: plans a request's draft length from its recent record.

vLLM plans a step before the drafts that it will verify exist, and so plans K for every request. This one plans
the length that the request's last known draft had: a request for which nothing is found costs one token, not
K + 1, from the third step on. The worker reports the lengths on its output. Before, and where drafts are trimmed on the
device (adaptive verification), which reports none, a request's options count.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_specplugins.engine.options import request_options
from vllm_specplugins.engine.v2.report import REPORT
from vllm_specplugins.request_options import draft_limit


class PlannedScheduler(AsyncScheduler):
    """vLLM's AsyncScheduler with true draft lengths, one step late."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._planned: dict[str, int] = {}
        self._has_options = False  # whether any request that lives had some when it came

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._has_options |= bool(request_options(request.sampling_params))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if lengths := getattr(model_runner_output, REPORT, None):
            self._planned.update(lengths.items())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if len(self._planned) > 2 * len(self.requests) + 64:
            self._planned = {key: n for key, n in self._planned.items() if key in self.requests}
        self._has_options &= bool(self.requests)
        return outputs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if not (self._planned or self._has_options):
            return
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.spec_token_ids:
                planned = self._planned.get(request_id)
                most = self._allowed(request) if planned is None else planned
                request.spec_token_ids = request.spec_token_ids[:most]

    def _allowed(self, request: Any) -> int:
        """For a request of which no draft is known yet."""
        options = request_options(request.sampling_params)
        return draft_limit(options, request.num_tokens, self.num_spec_tokens, self.max_model_len)
