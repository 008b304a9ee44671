"""The fault barrier: adapters call a proposer through it and always get a valid draft, which is empty after a fault."""

import time
from collections.abc import Sequence

import numpy as np

from vllm_specplugins.counters import Counters, Histogram
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer
from vllm_specplugins.isolation.exchange import checked_draft, draft_of_rows, for_proposer
from vllm_specplugins.isolation.guard import NO_TEXTS, Guard, Texts
from vllm_specplugins.stage import stage_of


class FaultBarrier:
    """Calls a proposer through a guard, and counts its drafts. `time_budget_ms` limits one step, in a thread of the
    proposer; None calls it in the caller's thread without a limit (for proposers that run the target, and for cascades,
    which have guards for their stages)."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        max_num_draft: int,
        time_budget_ms: float | None,
        *,
        name: str = "The proposer",
        ends_process: bool = False,
    ):
        self.counters = Counters()
        modes = {"in_thread": time_budget_ms is not None, "ends_process": ends_process}
        self.guard = Guard(proposer, name, self.counters, time_budget_ms, **modes)
        self._sizes = max_num_draft, vocab_size

    @property
    def proposer(self) -> Proposer:
        """Returns the guarded proposer; an adapter that records a CUDA graph calls it directly."""
        return self.guard.proposer

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        """Counts the outcome of the last drafts and returns valid drafts for this step."""
        self.counters.add(feedback)
        if batch.num_reqs == 0:
            return Draft.empty(0)
        draft = self.draft(batch, feedback)
        self.count_drafts(batch, draft)
        return draft

    def count_drafts(self, batch: DraftBatch, draft: Draft) -> None:
        self.counters.add_drafts(int(np.count_nonzero(batch.max_num_draft)), Histogram(draft.num_draft.tolist()))

    def draft(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        """Returns valid drafts, and counts only their time and faults."""
        self.guard.begin_step()
        start = time.perf_counter()
        try:
            return self._draft(batch, feedback)
        finally:
            self.counters.propose_ms += (time.perf_counter() - start) * 1000

    def _draft(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        may_draft, limits, proposer = self.guard.may_draft(batch.request_ids), batch.max_num_draft, self.proposer
        if may_draft is not None and not any(may_draft):
            return Draft.empty(batch.num_reqs)
        self.guard.observe(feedback)
        rows = np.arange(batch.num_reqs) if may_draft is None else np.flatnonzero(may_draft)
        shown, sizes = self.guard.shown(batch, rows.tolist()), self._sizes
        if may_draft is None:
            given, runs_target = for_proposer(shown), batch.target is not None
            draft = self.guard.call(batch, lambda: checked_draft(proposer.propose(given), limits, *sizes, runs_target))
        else:
            draft = self.guard.call(batch, lambda: draft_of_rows(proposer, shown, rows, limits, *sizes))
        return Draft.empty(batch.num_reqs) if draft is None else draft

    def totals(self) -> Counters:
        self.counters.stages = stage_of(self.proposer).stage_counters()
        return self.counters

    def forget(self, request_ids: Sequence[str], texts: Texts = NO_TEXTS) -> None:
        self.guard.forget(request_ids, texts)

    def settle(self) -> None:
        """Makes the proposer and a cascade's stages forget ended requests now, since no step may follow for a while."""
        self.guard.settle()
        stage_of(self.proposer).settle_stages()
