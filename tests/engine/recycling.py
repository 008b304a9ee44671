"""A proposer of the user's own that drafts, token after token, what the target last found likeliest."""

from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext

LIKELIEST = {"method": "custom", "proposer": "recycling:Recycling", "num_speculative_tokens": 4}


class Recycling:
    reads_likeliest = True

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        self.next_ids: dict[int, int] = {}
        self.told: set[tuple[int, int]] = set()

    def propose(self, batch: DraftBatch) -> Draft:
        if (seen := batch.likeliest) is not None:
            pairs = list(zip(seen.token_ids.tolist(), seen.next_ids.tolist(), strict=True))
            self.next_ids.update(pairs)
            self.told.update(pairs)
        token_ids = np.zeros((batch.num_reqs, max(batch.max_num_draft, default=0)), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        for row, text in enumerate(batch.token_ids):
            token = int(text[-1])
            while num_draft[row] < batch.max_num_draft[row] and token in self.next_ids:
                token = token_ids[row, num_draft[row]] = self.next_ids[token]
                num_draft[row] += 1
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...
