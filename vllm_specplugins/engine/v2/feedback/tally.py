"""Model Runner V2: running totals of drafts and of what became of them, kept on the device.

No step looks at them: they are copied to the host when a report is due, and read when the next one is. R: rows of the
batch or of a graph, K: most tokens of a draft, M: stages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.counters import Counters, StageCounters, count
from vllm_specplugins.draft import Feedback
from vllm_specplugins.engine.v2.feedback.async_copy import AsyncCopy
from vllm_specplugins.isolation.faults import NOT_FINITE
from vllm_specplugins.kernels.steps import ASKED, CONFIRMED, DRAFTED, DRAFTS, KINDS, SUMS, Rows, Staged, Totals, tally

Ints = npt.NDArray[np.int64]


class Tally:
    """Of all requests together, and of each what its acceptance rate takes.

    Args:
        num_stages: M; 0: stages are not told apart.
    """

    implementation: str | None = None  # of kernels/steps; the reference where a kernel failed its check

    def __init__(self, num_slots: int, max_num_draft: int, num_stages: int, device: torch.device):
        width = max_num_draft + 2
        # As kernels/steps counts; then tokens that were drawn from logits that are not finite.
        of_stages = (num_stages, len(KINDS), max_num_draft), (num_stages, len(SUMS))
        self._shapes = (width, width), (2, width), *of_stages, (1,)
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._totals = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._starts, self._width = np.cumsum([0, *sizes]).tolist(), width
        self._once = torch.ones(num_slots, dtype=torch.int64, device=device)  # what a row counts
        self._by_slot = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)  # verified, accepted
        self._counts_now, self._drafted, self._rests = True, max_num_draft, 0
        self._slots: dict[str, int] = {}
        self._over: list[AsyncCopy] = []  # of requests that are over
        self._arriving: AsyncCopy | None = None
        self._told = np.zeros(len(self._totals), np.int64)

    def begin(self, counts: bool) -> None:
        """A step; one that `counts` not is a rehearsal."""
        if counts != self._counts_now:
            self._counts_now = counts
            self._once.fill_(counts)

    def rests(self, input_batch: Any, length: int) -> bool:
        """Whether a step that may draft so many tokens has nothing to do: nothing was drafted in the one before."""
        before, self._drafted = self._drafted, length
        if length or before or input_batch.has_prefill:
            return False
        self._rests += input_batch.num_reqs
        return True

    def start(self, slots: dict[str, int]) -> None:
        """Requests that are new, or back after a preemption."""
        self._slots |= slots
        self._by_slot.index_fill_(0, async_tensor_h2d(np.array(list(slots.values())), self._by_slot.device), 0)

    def add(self, feedback: Feedback) -> None:
        """Nothing: a step that is drafted for outside of graphs tells the host no more than one within."""

    def take(self, request_ids: Sequence[str]) -> list[float]:
        """Acceptance rates of requests that were over earlier; begins to copy those of requests that are over now."""
        pairs = np.concatenate([np.zeros((0, 2), np.int64), *(arriving.values() for arriving in self._over)])
        slots = [slot for request_id in request_ids if (slot := self._slots.pop(request_id, None)) is not None]
        self._over.clear()
        if slots:
            rows = async_tensor_h2d(np.array(slots), self._by_slot.device)
            self._over.append(AsyncCopy((), self._by_slot[rows]))
        rates: list[float] = [accepted / verified for verified, accepted in pairs.tolist() if verified]
        return rates

    def add_rows(self, rows: Rows, wanted: torch.Tensor, num_draft: torch.Tensor, staged: Staged | None = None) -> None:
        """New drafts, and what became of the last ones: see kernels/steps."""
        totals = Totals(self._totals, self._by_slot, self._once)
        tally(totals, rows, wanted, num_draft, self._width - 2, staged, self.implementation)

    def add_q(
        self,
        q_logits: torch.Tensor,  # [R, T, vocab_size]
        slots: torch.Tensor,  # [R], -1: padding
        is_drawn: torch.Tensor | None = None,  # [R, T] bool, which of them count; None: all
    ) -> None:
        """What tokens were drawn from, of which rows that are no distribution are faults."""
        is_broken = ~q_logits.amax(dim=-1).isfinite() & (slots >= 0)[:, None]
        if is_drawn is not None:
            is_broken &= is_drawn
        start = self._starts[4]
        self._totals[start : start + 1] += (is_broken.sum(dim=1) * self._once[: len(slots)]).sum()

    def move_to(self, counters: Counters, stages: Sequence[StageCounters]) -> None:
        """Adds what had been counted when this was last called, and begins to copy what has been since."""
        counters.request_steps += self._rests
        if self._rests:
            count(counters.draft_lengths, 0, self._rests)
        self._rests = 0
        arriving, self._arriving = self._arriving, AsyncCopy((), self._totals)
        if arriving is None:
            return
        totals = arriving.values()
        more, self._told = totals - self._told, totals.copy()
        fates, drafts, by_place, by_stage, broken = (
            more[start:end].reshape(shape)
            for start, end, shape in zip(self._starts, self._starts[1:], self._shapes, strict=False)
        )
        _add_fates(counters, fates[1:, 1:])
        drafts[0, 0] += fates[1:].sum() - drafts.sum()  # rows in the middle of their prompt are none, nor is padding
        _add_drafts(counters, drafts)
        if num_broken := int(broken[0]):
            counters.faults[NOT_FINITE] = counters.faults.get(NOT_FINITE, 0) + num_broken
        for own, (verified, accepted, kept), sums in zip(stages, by_place, by_stage, strict=False):
            own.verified += int(verified.sum())
            own.accepted += int(accepted.sum())
            own.kept += int(kept.sum() + sums[CONFIRMED])
            own.asked, own.drafted = own.asked + int(sums[ASKED]), own.drafted + int(sums[DRAFTED])
            own.drafts += int(sums[DRAFTS])
            _count_all(own.accepted_at, accepted)


def _add_fates(counters: Counters, fates: Ints) -> None:
    """Requests by (tokens verified, tokens accepted)."""
    verified, accepted, lengths = fates.sum(axis=1), fates.sum(axis=0), np.arange(len(fates))
    counters.request_steps += int(fates.sum())
    counters.drafts += int(verified[1:].sum())
    counters.drafted_tokens += int(verified @ lengths)
    counters.accepted_tokens += int(accepted @ lengths)
    counters.whole.verified, counters.whole.accepted = counters.drafted_tokens, counters.accepted_tokens
    _count_all(counters.whole.accepted_at, accepted[:0:-1].cumsum()[::-1])


def _add_drafts(counters: Counters, drafts: Ints) -> None:
    """Requests by (whether they wanted tokens, tokens drafted)."""
    lengths = drafts.sum(axis=0)
    counters.whole.asked += int(drafts[1].sum())
    counters.whole.drafts += int(lengths[1:].sum())
    counters.whole.drafted += int(lengths @ np.arange(len(lengths)))
    counters.whole.kept = counters.whole.drafted
    _count_all(counters.draft_lengths, lengths)


def _count_all(totals: list[int], more: Ints) -> None:
    for index in np.flatnonzero(more).tolist():
        count(totals, index, int(more[index]))
