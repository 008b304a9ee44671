"""Model Runner V2: a request's tokens on the host, for a proposer that reads them there."""

from typing import Any

import numpy as np

from vllm_specplugins.draft import Int32Array
from vllm_specplugins.engine.frontend.options import length_limit, request_options
from vllm_specplugins.isolation.exchange import frozen
from vllm_specplugins.structures.arrays import view


class RequestHistory:
    """Of a request that is new, or back after a preemption; and its options, that nobody can write to."""

    def __init__(self, new: Any, max_model_len: int):
        self.request_id, self.options = new.req_id, frozen(request_options(new.sampling_params))
        self.length_limit = length_limit(new.sampling_params, new.prompt_len, max_model_len)
        self._tokens, self.num_tokens = np.empty(max_model_len, np.int32), 0
        self._shown = view(self._tokens)
        self.extend(new.prefill_token_ids)

    @property
    def token_ids(self) -> Int32Array:
        """[num_tokens], read-only."""
        return self._shown[: self.num_tokens]

    def extend(self, token_ids: Any) -> None:
        """Takes what came; past max_model_len there is nothing."""
        end = min(self.num_tokens + len(token_ids), len(self._tokens))
        self._tokens[self.num_tokens : end] = token_ids[: end - self.num_tokens]
        self.num_tokens = end
