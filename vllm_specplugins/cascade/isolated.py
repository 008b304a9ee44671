"""A stage of a cascade that runs on the host, with a guard of its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.cascade.drafters import Drafter
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.structures.draft_arrays import Array, DraftArrays, nothing


@dataclass(slots=True)
class IsolatedDrafter:
    """A drafter whose faults cost its own drafts, and no other stage's.

    Where every rank drafts, rank 0 alone asks the stage and the others are told: time-outs, faults and whatever a
    proposer of the user's own goes by would not be the same on all of them.
    """

    drafter: Drafter
    guard: Guard
    counters: StageCounters
    width: int  # K
    rank: int
    agreed: Callable[[Any], Any]

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        start = time.perf_counter()
        drafts: DraftArrays = self.agreed(self._draft(batch, prefix, max_draft) if self.rank == 0 else None)
        self.counters.asked += int(np.count_nonzero(max_draft))
        self.counters.drafted += sum(drafts.num_draft.tolist())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return drafts

    def _draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        may_draft = self.guard.may_draft(batch.request_ids)
        if may_draft is not None:
            max_draft = np.where(may_draft, max_draft, 0)
        drafts = None
        if np.count_nonzero(max_draft) or self.guard.has_to_forget:
            drafts = self.guard.call(batch, lambda: self.drafter.draft(batch, prefix, max_draft))
        return nothing(len(max_draft), self.width) if drafts is None else drafts
