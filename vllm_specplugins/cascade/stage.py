"""Defines a stage of a cascade: a proposer, its guard and its counters."""

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_specplugins.config import StageConfig
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.isolation.exchange import draft_of_rows
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.methods import Method, method_of
from vllm_specplugins.request_options import allows
from vllm_specplugins.structures.arrays import Ints
from vllm_specplugins.structures.drafts import FIRST_CONFIDENCE, DraftArrays, nothing, of_stage

if TYPE_CHECKING:
    from vllm_specplugins.gate.gate import Gate


class Source(Protocol):
    """A stage, which may check the drafts of other stages."""

    index: int
    method: Method
    proposer: Any
    counters: StageCounters

    def limits(self, batch: DraftBatch, limits: Ints) -> Ints:
        """Limits these numbers of tokens, [num_reqs], by the stage's K and the requests' options."""

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts at most limits [num_reqs] tokens for each request, after its history and the prefix of its
        draft."""


class Stage:
    """A proposer of a cascade. Only a lookup and a model continue the drafts of other stages. If every rank of a
    tensor-parallel group drafts, only rank 0 asks a proposer on the host, since faults and times differ between ranks.
    `gate` decides, equally on every rank, when to call a proposer that does not pay off; None: in every step."""

    def __init__(
        self, index: int, config: StageConfig, name: str, proposer: Any, context: ProposerContext, gate: "Gate | None"
    ):
        self.index, self.name, self.proposer, self._context = index, name, proposer, context
        self.title, self.method = f"{index} {config.method}", method_of(config.method)
        self.max_num_draft = config.num_speculative_tokens or context.max_num_draft
        self.counters = StageCounters()
        is_cheap = self.method.is_lookup or self.method.is_late
        self.num_spared = 0  # calls that the gate skipped
        self._gate, self.answer_ms = None if is_cheap else gate, 0.0  # 0: it was not called in the last step
        self._ahead: tuple[Any, DraftArrays] | None = None

    @cached_property
    def guard(self) -> Guard | None:
        """Returns the guard of a proposer on the host. A proposer that runs the target has no guard: its fault is the
        cascade's."""
        if self.method.runs_target:
            return None
        budget_ms = self._context.time_budget_ms
        return self._new_guard(budget_ms, in_thread=budget_ms is not None)

    def _new_guard(self, budget_ms: float | None, **how: bool) -> Guard:
        index, _, method = self.title.partition(" ")
        return Guard(self.proposer, f"Stage {index} ({method})", self.counters, budget_ms, **how)

    def limits(self, batch: DraftBatch, limits: Ints) -> Ints:
        allowed, limits = allows(batch.options, self.name), np.minimum(limits, self.max_num_draft)
        return limits if allowed is None else np.where(allowed, limits, 0)

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        if prefix is None and self.has_drafted(batch):
            assert self._ahead is not None
            (_, ahead), self._ahead = self._ahead, None
            return ahead
        start = time.perf_counter()
        drafts: DraftArrays | None
        if self.method.runs_target:
            drafts = self.proposer.draft(batch, prefix, limits)
        else:
            if self._gate is not None and not self._gate.asks(self.index, len(limits)):
                limits = np.zeros_like(limits)
                self.num_spared += 1
            drafts = self._guarded(batch, prefix, limits) if self._context.rank == 0 else None
            drafts = self._context.agreed(drafts)
        assert drafts is not None
        self.counters.ms += (time.perf_counter() - start) * 1000
        return self._counted(drafts, limits)

    def _counted(self, drafts: DraftArrays, limits: Ints) -> DraftArrays:
        drafts.stage[:] = self.index
        self.counters.asked += int(np.count_nonzero(limits))
        self.counters.drafted += sum(drafts.num_draft.tolist())
        return drafts

    def draft_ahead(self, batch: DraftBatch, limits: Ints) -> DraftArrays:
        """Drafts before the step's drafting, which then uses these drafts."""
        drafts = self.draft(batch, None, limits)
        self._ahead = _step_of(batch), drafts
        return drafts

    def has_drafted(self, batch: DraftBatch) -> bool:
        return self._ahead is not None and self._ahead[0] == _step_of(batch)

    def _guarded(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        guard, drafts, self.answer_ms = self.guard, None, 0.0
        assert guard is not None
        may_draft = guard.may_draft(batch.request_ids)
        if may_draft is not None:
            limits = np.where(may_draft, limits, 0)
        # A store also receives a request's last tokens, after which no draft is wanted.
        sees_all = self.method.is_lookup and self.method.has_tenants and may_draft is None
        if sees_all or np.count_nonzero(limits):
            draft, start = self.proposer.draft if self.method.is_lookup else self._begun, time.perf_counter()
            shown = guard.shown(batch, np.flatnonzero(limits).tolist())
            drafts = guard.call(batch, lambda: draft(shown, prefix, limits))
            self.answer_ms = (time.perf_counter() - start) * 1000
        elif guard.has_to_forget:
            guard.call(batch, lambda: None)
        return nothing(len(limits), self._context.max_num_draft) if drafts is None else drafts

    def _begun(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        rows = np.flatnonzero(limits if prefix is None else limits * (prefix.num_draft == 0))
        num_reqs, max_num_draft = len(limits), self._context.max_num_draft
        if not len(rows):
            return nothing(num_reqs, max_num_draft)
        draft = draft_of_rows(
            self.proposer, batch, rows, limits.astype(np.int32), max_num_draft, self._context.vocab_size
        )
        confidence = np.full(num_reqs, FIRST_CONFIDENCE) if draft.confidence is None else draft.confidence
        return of_stage(0, draft.token_ids, draft.num_draft, confidence)


def _step_of(batch: DraftBatch) -> tuple[tuple[str, ...], list[int]]:
    """Returns the identity of a step: its requests and the lengths of their histories."""
    return tuple(batch.request_ids), list(map(len, batch.token_ids))
