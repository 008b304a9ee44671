"""A stage of a cascade that runs on the host, behind a guard of its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.cascade.drafters import Drafter
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.structures.draft_arrays import Array, Drafted, nothing


@dataclass(slots=True)
class Guarded:
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

    def draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        start = time.perf_counter()
        drafts: Drafted = self.agreed(self._draft(batch, begun, wanted) if self.rank == 0 else None)
        self.counters.asked += int(np.count_nonzero(wanted))
        self.counters.drafted += sum(drafts.num_draft.tolist())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return drafts

    def _draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        may_draft = self.guard.may_draft(batch.request_ids)
        if may_draft is not None:
            wanted = np.where(may_draft, wanted, 0)
        drafts = None
        if np.count_nonzero(wanted) or self.guard.has_to_forget:
            drafts = self.guard.call(batch, lambda: self.drafter.draft(batch, begun, wanted))
        return nothing(len(wanted), self.width) if drafts is None else drafts
