"""A stage of a cascade: a proposer, and what drafts for it."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.cascade.built_in import BuiltIn
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.isolation.exchange import draft_of_rows
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.methods import Method
from vllm_specplugins.request_options import allows
from vllm_specplugins.structures.arrays import (
    FIRST_CONFIDENCE,
    NO_COUNTS,
    NO_TOKENS,
    DraftArrays,
    Ints,
    nothing,
    of_stage,
)


@dataclass(slots=True)
class Stage:
    """A stage of a cascade: a proposer, and what drafts for it.

    What runs on the host has a guard: its faults cost its own drafts alone. Where every rank drafts, rank 0 alone asks
    it and the others are told: faults and times would not be the same on all of them.

    Args:
        guard: what runs the target has none: it fails with the cascade, or with the target.
        name: what requests' options call it.
        max_num_draft: of its own, at most K.
        gate: where it does not pay, what runs on the host is asked now and then; None: in every step.
    """

    index: int
    proposer: Any
    method: Method
    guard: Guard | None
    counters: StageCounters
    name: str
    max_num_draft: int
    context: ProposerContext
    gate: Gate | None = None
    asked_ms: float = 0.0  # of the last step in which it was asked
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Ints) -> DraftArrays:
        """At most so many tokens [num_reqs] for each request, after its history and the prefix of its draft."""
        if isinstance(self.proposer, BuiltIn):  # it has drafted, and the time of that is counted
            if batch.offer is None:
                return nothing(len(max_draft), self.context.max_num_draft)
            drafts = self._continued(batch, prefix, max_draft)
        else:
            start = time.perf_counter()
            if self.guard is None:
                drafts = self._continued(batch, prefix, max_draft)
            else:
                found = self._guarded(self.guard, batch, prefix, max_draft) if self.context.rank == 0 else None
                drafts = self.context.agreed(found)
            self.counters.ms += (time.perf_counter() - start) * 1000
        self.counters.asked += int(np.count_nonzero(max_draft))
        self.counters.drafted += sum(drafts.num_draft.tolist())
        return drafts

    def _continued(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Ints) -> DraftArrays:
        begun = (NO_TOKENS, NO_COUNTS) if prefix is None else (prefix.token_ids, prefix.num_draft)
        return of_stage(self.index, *self.proposer.continue_drafts(batch, *begun, max_draft))

    def _guarded(self, guard: Guard, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Ints) -> DraftArrays:
        may_draft, drafts = guard.may_draft(batch.request_ids), None
        if self.gate is not None and not self.gate.asks(self.index, len(max_draft), self.asked_ms):
            max_draft = np.zeros_like(max_draft)
        elif may_draft is not None:
            max_draft = np.where(may_draft, max_draft, 0)
        keeps = self.method.is_lookup and self.method.has_tenants and may_draft is None  # also a request's last tokens
        if keeps or np.count_nonzero(max_draft):
            draft = self._continued if self.method.is_lookup else self._begun
            start = time.perf_counter()
            drafts = guard.call(batch, lambda: draft(batch, prefix, max_draft))
            self.asked_ms = (time.perf_counter() - start) * 1000
        elif guard.has_to_forget:
            guard.call(batch, lambda: None)
        return nothing(len(max_draft), self.context.max_num_draft) if drafts is None else drafts

    def _begun(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Ints) -> DraftArrays:
        """Of any other proposer: it only begins drafts, and is asked for those requests alone that want some."""
        rows = np.flatnonzero(max_draft if prefix is None else max_draft * (prefix.num_draft == 0))
        most, limits = self.context.max_num_draft, max_draft.astype(np.int32)
        if not len(rows):
            return nothing(len(max_draft), most)
        draft = draft_of_rows(self.proposer, batch, rows, limits, most, self.context.vocab_size)
        confidence = np.full(len(max_draft), FIRST_CONFIDENCE) if draft.confidence is None else draft.confidence
        return of_stage(self.index, draft.token_ids, draft.num_draft, confidence)

    def limits(self, batch: DraftBatch, max_draft: Ints) -> Ints:
        """[num_reqs], tokens that it may draft of these, by the requests' options."""
        allowed, limits = allows(batch.options, self.name), np.minimum(max_draft, self.max_num_draft)
        return limits if allowed is None else np.where(allowed, limits, 0)
