"""Model Runner V2: the most draft tokens of each request, as tensors on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.config import StageConfig
from vllm_specplugins.engine.frontend.options import length_limit, request_options
from vllm_specplugins.engine.v2.feedback.report import warms_up
from vllm_specplugins.kernels.steps import Rows, Wanted, limit
from vllm_specplugins.request_options import MAX_CONTEXT


class DraftLimits:
    """Of all slots of requests, in tensors that stay where they are: graphs read them.

    Args:
        req_states: vLLM's states of requests.
        model_config: vLLM may fit max_model_len to the memory until graphs are recorded.
        max_num_draft: K.
        stages: of a cascade; a request may allow some.
    """

    implementation: str | None = None  # of kernels/steps; the reference where a kernel failed its check

    def __init__(
        self,
        req_states: Any,
        model_config: Any,
        max_num_draft: int,
        device: torch.device,
        stages: Sequence[StageConfig] = (),
    ):
        self._req_states, self._model_config, self._max_num_draft = req_states, model_config, max_num_draft
        self._stages = [stage.method for stage in stages]
        self.of_stages = [stage.num_speculative_tokens or max_num_draft for stage in stages]  # most tokens of each
        # Columns of kernels/steps, and which stages are allowed.
        shape = req_states.max_num_reqs, 3 + len(stages)
        self._limits = torch.zeros(shape, dtype=torch.int32, device=device)
        self._most, self._most_there = max_num_draft, torch.full((), max_num_draft, dtype=torch.int32, device=device)

    def begin(self, most: int) -> None:
        """A step whose drafts have at most so many tokens."""
        if most != self._most:
            self._most = most
            self._most_there.fill_(most)

    def add(self, new_requests: Any) -> None:
        """Takes what requests that are new, or back after a preemption, allow."""
        if not new_requests:
            return
        rows = []
        for new in new_requests:
            options = request_options(new.sampling_params)
            num_draft = options.get("max_draft", self._max_num_draft) if options.get("enabled", True) else 0
            own = options.get("stages", self._stages)
            slot = self._req_states.req_id_to_index[new.req_id]
            allowed = (name in own for name in self._stages)
            longest = self._model_config.max_model_len
            if not warms_up([new.req_id]):  # two tokens long, so that kernels for drafts would not be warmed up
                longest = length_limit(new.sampling_params, new.prompt_len, longest)
            rows.append((slot, num_draft, options.get("max_context", MAX_CONTEXT), longest - 1, *allowed))
        values = async_tensor_h2d(np.array(rows, np.int64), self._limits.device)
        self._limits[values[:, 0]] = values[:, 1:].int()

    def wanted(self, rows: Rows, mapping: torch.Tensor) -> Wanted:
        """How many tokens each row wants, `draft_limit` of them; `mapping`: see kernels/steps."""
        limits = self._req_states.total_len.gpu, self._limits, self._most_there
        return limit(rows, *limits, mapping, tuple(self.of_stages), self.implementation)
