"""What a cascade is made of: its stages, and what drafts for one on the host, or with a part of the target."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.isolation.exchange import checked_draft, rows_of
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.methods import Method
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.draft_arrays import (
    NO_COUNTS,
    NO_TOKENS,
    Array,
    DraftArrays,
    columns,
    nothing,
    of_stage,
)

# Continues drafts: at most so many tokens [num_reqs] for each request, after its history and the prefix of its draft.
Drafter = Callable[[DraftBatch, DraftArrays | None, Array], DraftArrays]


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


@dataclass(slots=True)
class ModelDrafter:
    """The model stage with this index by itself, token by token. One that is no exit only begins drafts: it needs the
    target's last state."""

    stage: Any
    index: int
    counters: StageCounters

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        assert batch.target is not None
        if prefix is not None and not isinstance(self.stage, EarlyExit):
            max_draft, prefix = np.where(prefix.num_draft == 0, max_draft, 0), None
        num_steps, num_reqs = max(max_draft.tolist(), default=0), len(max_draft)
        if num_steps == 0:
            return nothing(num_reqs, self.stage.max_num_draft)
        start = time.perf_counter()
        behind: tuple[torch.Tensor, ...] = ()
        if prefix is not None:
            # Rows that want nothing start at their newest token: after it no slot is read that was not written.
            lengths = prefix.num_draft * (max_draft > 0)
            if longest := max(lengths.tolist()):
                device = batch.target.num_tokens.device
                fed = np.ascontiguousarray(prefix.token_ids[:, :longest])
                behind = torch.from_numpy(fed).to(device), torch.from_numpy(lengths).to(device)
        chosen, logits = self.stage.draft_from(batch.target, num_steps, *behind)
        token_ids = np.zeros((num_reqs, self.stage.max_num_draft), np.int32)
        token_ids[:, :num_steps] = chosen.cpu().numpy()
        q = None
        if logits is not None:
            q = np.arange(0, num_reqs * num_steps, num_steps)[:, None] + columns(token_ids)
            logits = logits.flatten(0, 1)
        self.counters.asked += int(np.count_nonzero(max_draft))
        self.counters.drafted += sum(max_draft.tolist())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return of_stage(self.index, token_ids, max_draft, np.full(num_reqs, FIRST_CONFIDENCE), q, logits)


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
class Stage:
    """A stage of a cascade.

    Args:
        guard: of its faults; what runs the target has none: it fails with the cascade, or with the target.
        name: what requests' options call it.
        max_num_draft: of its own, at most K.
    """

    index: int
    proposer: Any
    method: Method
    draft: Drafter
    guard: Guard | None
    counters: StageCounters
    name: str
    max_num_draft: int
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request

    def limits(self, batch: DraftBatch, max_draft: Array) -> Array:
        """[num_reqs], tokens that it may draft of these, by the requests' options."""
        allowed, limits = allows(batch.options, self.name), np.minimum(max_draft, self.max_num_draft)
        return limits if allowed is None else np.where(allowed, limits, 0)
