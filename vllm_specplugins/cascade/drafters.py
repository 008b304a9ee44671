"""Drafters: what a cascade is made of. Each continues drafts that others began; policies are drafters that hold two.

See staged.py for the third of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import DraftBatch, Proposer
from vllm_specplugins.isolation.checks import checked_draft
from vllm_specplugins.isolation.read_only import rows_of
from vllm_specplugins.structures.draft_arrays import NO_COUNTS, NO_TOKENS, Array, DraftArrays, nothing, of_stage


class Drafter(Protocol):
    """Continues drafts."""

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        """At most `max_draft` [num_reqs] tokens for each request, after its history and the prefix of its draft."""


@dataclass(slots=True)
class LookupDrafter:
    """A stage that can continue drafts, with this index. Its confidence is the length of the match."""

    stage: Any  # PromptLookup or SuffixLookup
    index: int

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        behind = (NO_TOKENS, NO_COUNTS) if prefix is None else (prefix.token_ids, prefix.num_draft)
        return of_stage(self.index, *self.stage.continue_drafts(batch, *behind, max_draft))


@dataclass(slots=True)
class HostDrafter:
    """Any other proposer that runs on the host. It cannot continue a draft, and so only begins one.

    It is asked for those requests alone that want one of it, and what it answers is checked.
    """

    stage: Proposer
    index: int
    width: int  # K
    vocab_size: int

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        drafts = nothing(len(max_draft), self.width)
        rows = np.flatnonzero(max_draft if prefix is None else max_draft * (prefix.num_draft == 0))
        if not len(rows):
            return drafts
        limits = max_draft[rows].astype(np.int32)
        answer = self.stage.propose(rows_of(batch, rows.tolist(), limits))
        draft = checked_draft(answer, limits, self.width, self.vocab_size)
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
