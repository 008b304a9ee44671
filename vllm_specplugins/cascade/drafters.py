"""Drafters: what a cascade is made of. Each continues drafts that others began; policies are drafters that hold two.

See staged.py for the third of them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.isolation.checks import checked_draft
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.isolation.read_only import rows_of
from vllm_specplugins.structures.draft_arrays import NO_COUNTS, NO_TOKENS, Array, DraftArrays, nothing, of_stage


class Drafter(Protocol):
    """Continues drafts."""

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        """At most `max_draft` [num_reqs] tokens for each request, after its history and the prefix of its draft."""


@dataclass(slots=True)
class HostDrafter:
    """A stage that runs on the host, with this index and a guard of its own: its faults cost its own drafts alone.

    A lookup continues drafts, and its confidence is the length of the match. Any other proposer only begins them; it is
    asked for those requests alone that want some, and what it answers is checked. Where every rank drafts, rank 0 alone
    asks the stage and the others are told: faults and times would not be the same on all of them.

    Args:
        gate: where it does not pay this is asked now and then; None: in every step.
    """

    stage: Any
    index: int
    is_lookup: bool
    guard: Guard
    counters: StageCounters
    context: ProposerContext
    gate: Gate | None = None
    ms: float = 0.0  # of the last step in which it was asked

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        start = time.perf_counter()
        found = self._guarded(batch, prefix, max_draft) if self.context.rank == 0 else None
        drafts: DraftArrays = self.context.agreed(found)
        self.counters.asked += int(np.count_nonzero(max_draft))
        self.counters.drafted += sum(drafts.num_draft.tolist())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return drafts

    def _guarded(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        may_draft, drafts = self.guard.may_draft(batch.request_ids), None
        if self.gate is not None and not self.gate.asks(self.index, len(max_draft), self.ms):
            max_draft = np.zeros_like(max_draft)
        elif may_draft is not None:
            max_draft = np.where(may_draft, max_draft, 0)
        if np.count_nonzero(max_draft):
            start = time.perf_counter()
            drafts = self.guard.call(batch, lambda: self._draft(batch, prefix, max_draft))
            self.ms = (time.perf_counter() - start) * 1000
        elif self.guard.has_to_forget:
            self.guard.call(batch, lambda: None)
        return nothing(len(max_draft), self.context.max_num_draft) if drafts is None else drafts

    def _draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        if self.is_lookup:
            begun = (NO_TOKENS, NO_COUNTS) if prefix is None else (prefix.token_ids, prefix.num_draft)
            return of_stage(self.index, *self.stage.continue_drafts(batch, *begun, max_draft))
        drafts = nothing(len(max_draft), self.context.max_num_draft)
        rows = np.flatnonzero(max_draft if prefix is None else max_draft * (prefix.num_draft == 0))
        if not len(rows):
            return drafts
        limits = max_draft[rows].astype(np.int32)
        answer = self.stage.propose(rows_of(batch, rows.tolist(), limits))
        draft = checked_draft(answer, limits, self.context.max_num_draft, self.context.vocab_size)
        confidence = np.ones(len(max_draft))
        if draft.confidence is not None:
            confidence[rows] = draft.confidence
        drafts.token_ids[rows, : draft.token_ids.shape[1]] = draft.token_ids
        drafts.num_draft[rows] = draft.num_draft
        return of_stage(self.index, drafts.token_ids, drafts.num_draft, confidence)


def allows(options: Sequence[Mapping[str, Any]], name: str) -> npt.NDArray[np.bool_] | None:
    """[num_reqs] bool: whether each request's options let the stage of this name draft; None if all do.

    >>> allows([{}, {"stages": ("a",)}], "a"), allows([{}, {"stages": ("a",)}], "b").tolist()
    (None, [True, False])
    """
    if not any(options):
        return None
    allowed = np.array([not own or name in own.get("stages", (name,)) for own in options], bool)
    return None if allowed.all() else allowed


@dataclass(slots=True)
class OptionFilter:
    """A stage's drafter where a request's options allow that stage, and `otherwise`, if any, where they do not."""

    drafter: Drafter
    otherwise: Drafter | None
    name: str
    most: int  # tokens that the stage drafts for one request

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        allowed = allows(batch.options, self.name)
        own_max_draft = np.minimum(max_draft, self.most)
        if allowed is None:
            return self.drafter.draft(batch, prefix, own_max_draft)
        drafts = self.drafter.draft(batch, prefix, np.where(allowed, own_max_draft, 0))
        if self.otherwise is None:
            return drafts
        return drafts.followed_by(self.otherwise.draft(batch, prefix, np.where(allowed, 0, max_draft)))


@dataclass(slots=True)
class First:
    """Without a gate: the second drafter drafts for those for whom the first one has nothing."""

    first: Drafter
    second: Drafter

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        drafts = self.first.draft(batch, prefix, max_draft)
        rest = max_draft * (drafts.num_draft == 0)
        return drafts.followed_by(self.second.draft(batch, prefix, rest))
