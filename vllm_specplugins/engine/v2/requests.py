"""Model Runner V2: stores the data of requests that drafting needs, and the limits of all requests on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.config import StageConfig
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.kernels.steps import Rows, Wanted, limit
from vllm_specplugins.request_options import MAX_CONTEXT
from vllm_specplugins.structures.arrays import view


class Request:
    """The data of a request that drafting needs. The runner creates it from vLLM's NewRequestData, for a new request or
    a request that resumes after a preemption. `slot` is its row in vLLM's states. Without `reads_tokens` the host does
    not track its tokens, and `token_ids` stays empty. RequestLimits describes `num_beside`. A warm-up request of vLLM
    has no length limit: it has two tokens, and would otherwise warm up no kernels for drafts."""

    def __init__(
        self,
        new: Any,
        slot: int,
        max_model_len: int,
        reads_tokens: bool = False,
        num_beside: int = 0,
        is_warm_up: bool = False,
    ):
        self.request_id, self.slot, self.sampling_params = new.req_id, slot, new.sampling_params
        self.has_token_ids = new.prompt_embeds is None  # for all of its tokens
        self.limits = RequestLimits.of(new.sampling_params, new.prompt_len, max_model_len, num_beside).frozen()
        if is_warm_up:
            self.limits = self.limits._replace(length_limit=max_model_len)
        self.num_first, self.last_token_id = len(new.prefill_token_ids), new.prefill_token_ids[-1]
        self._tokens, self.num_tokens = np.empty(max_model_len if reads_tokens else 0, np.int32), 0
        self._readable = view(self._tokens)
        self.extend(new.prefill_token_ids)

    @property
    def token_ids(self) -> Int32Array:
        """Returns the request's tokens, [num_tokens], read-only."""
        return self._readable[: self.num_tokens]

    def extend(self, token_ids: Any) -> None:
        """Appends tokens and drops those past max_model_len."""
        end = min(self.num_tokens + len(token_ids), len(self._tokens))
        self._tokens[self.num_tokens : end] = token_ids[: end - self.num_tokens]
        self.num_tokens = end


class DraftLimits:
    """The limits of all request slots, in tensors at fixed addresses, since graphs read them. A request may allow only
    some of a cascade's `stages`."""

    def __init__(self, req_states: Any, max_num_draft: int, device: torch.device, stages: Sequence[StageConfig] = ()):
        self._req_states, self._max_num_draft = req_states, max_num_draft
        self._stages = [stage.method for stage in stages]
        self.of_stages = [stage.num_speculative_tokens or max_num_draft for stage in stages]  # K of each
        # The columns that kernels/steps reads, and whether the request allows each stage.
        shape = req_states.max_num_reqs, 3 + len(stages)
        self._limits = torch.zeros(shape, dtype=torch.int32, device=device)
        self._step_limit = max_num_draft
        self._step_limit_there = torch.full((), max_num_draft, dtype=torch.int32, device=device)

    def begin(self, max_draft_tokens: int) -> None:
        if max_draft_tokens != self._step_limit:
            self._step_limit = max_draft_tokens
            self._step_limit_there.fill_(max_draft_tokens)

    def add(self, requests: Sequence[Request]) -> None:
        rows = []
        for request in requests:
            options, length_limit = request.limits.options, request.limits.length_limit
            num_draft = options.get("max_draft", self._max_num_draft) if options.get("enabled", True) else 0
            allowed = options.get("stages", self._stages)
            columns = num_draft, options.get("max_context", MAX_CONTEXT), length_limit - 1
            rows.append((request.slot, *columns, *(name in allowed for name in self._stages)))
        values = async_tensor_h2d(np.array(rows, np.int64), self._limits.device)
        self._limits[values[:, 0]] = values[:, 1:].int()

    def wanted(self, rows: Rows, mapping: torch.Tensor) -> Wanted:
        """Returns the number of tokens that each row wants, by the rule of `draft_limit`; kernels/steps describes
        `mapping`."""
        limits = self._req_states.total_len.gpu, self._limits, self._step_limit_there
        return limit(rows, *limits, mapping, tuple(self.of_stages))
