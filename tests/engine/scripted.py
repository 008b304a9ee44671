"""A proposer that drafts what a test sets, and a logits processor, for the tests of verification."""

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext

CONFIG = {"method": "custom", "proposer": "scripted:Scripted", "num_speculative_tokens": 5}


class Scripted:
    """Drafts the next `depth` tokens of a request's `script`, of which every third is replaced by another token.
    Requests without a script get no draft.
    """

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        self._vocab_size, self._max_num_draft = context.vocab_size, context.max_num_draft

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids = np.zeros((batch.num_reqs, self._max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        for row, (history, options) in enumerate(zip(batch.token_ids, batch.options, strict=True)):
            if not options:
                continue
            begin = len(history) - options["num_prompt_tokens"]
            tokens = np.array(options["script"][begin : begin + options["depth"]], np.int32)
            tokens = tokens[: batch.max_num_draft[row]]
            is_wrong = np.arange(begin, begin + len(tokens)) % 3 == 2
            token_ids[row, : len(tokens)] = np.where(is_wrong, (tokens + 1) % self._vocab_size, tokens)
            num_draft[row] = len(tokens)
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


class NeverTwice(AdapterLogitsProcessor):
    """A logits processor of V1 that depends on the output: for requests that ask for it, no token appears twice."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        return self._forbid if (params.extra_args or {}).get("never_twice") else None

    @staticmethod
    def _forbid(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[output_token_ids] = -torch.inf
        return logits
