"""A stage of a cascade that runs on the host, behind a guard of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_specplugins.draft import DraftBatch, StageCounters
from vllm_specplugins.proposers.drafters import Drafter, Rows
from vllm_specplugins.proposers.guard import Guard


@dataclass(slots=True)
class Guarded:
    """A drafter whose faults cost its own drafts, and no other stage's.

    Where every rank drafts, rank 0 alone asks the stage and the others are told: time-outs, faults and whatever a
    proposer of the user's own goes by would not be the same on all of them.
    """

    drafter: Drafter
    guard: Guard
    counters: StageCounters
    rank: int
    agreed: Callable[[Rows], Rows]

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        start = time.perf_counter()
        rows = self.agreed(self._draft(batch, begun, wanted) if self.rank == 0 else [])
        self.counters.asked += sum(1 for limit in wanted if limit)
        self.counters.drafted += sum(map(len, rows))
        self.counters.ms += (time.perf_counter() - start) * 1000
        return rows

    def _draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        may_draft = self.guard.may_draft(batch.request_ids)
        if may_draft is not None:
            wanted = [limit if may else 0 for limit, may in zip(wanted, may_draft, strict=True)]
        rows = None
        if any(wanted) or self.guard.has_to_forget:
            rows = self.guard.call(batch, lambda: self.drafter.draft(batch, begun, wanted))
        return [[] for _ in wanted] if rows is None else rows
