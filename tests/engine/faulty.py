"""Proposers that do everything wrong, for the tests of the fault barrier in a running engine."""

import time
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


class Faulty:
    """Drafts the last token again; from its `start`-th step on it misbehaves as `options["fault"]` says."""

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        self._fault = options["fault"]
        self._start = options.get("start", 3)
        self._vocab_size = context.vocab_size
        self._step = 0

    def propose(self, batch: DraftBatch) -> Draft:
        self._step += 1
        num_draft = np.minimum(batch.max_num_draft, 2).astype(np.int32)
        last = np.array([tokens[-1] for tokens in batch.token_ids], np.int32)
        draft = Draft(np.stack([last, last], axis=1), num_draft)
        return draft if self._step < self._start else self._misbehave(draft)

    def _misbehave(self, draft: Draft) -> Any:
        token_ids, num_draft = draft.token_ids, draft.num_draft
        match self._fault:
            case "raises":
                raise RuntimeError("planted")
            case "hangs":
                time.sleep(1.5)
                return draft
            case "wrong rows":
                return Draft(token_ids[:-1], num_draft)
            case "wrong width":
                return Draft(np.zeros((len(num_draft), 99), np.int32), num_draft)
            case "too long":
                return Draft(token_ids, num_draft + 9)
            case "negative length":
                return Draft(token_ids, num_draft - 5)
            case "outside the vocabulary":
                return Draft(token_ids + self._vocab_size, num_draft)
            case "negative ids":
                return Draft(token_ids - 2 * self._vocab_size, num_draft)
            case "floats":
                return Draft(token_ids.astype(np.float64), num_draft)  # type: ignore[arg-type]
            case "nothing":
                return None
        raise AssertionError(self._fault)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Any) -> None:
        pass
