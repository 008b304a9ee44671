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
from vllm_specplugins.structures.arrays import DraftArrays, columns

_VERIFIED, _ACCEPTED, _KEPT = range(3)  # tokens of a stage, by place
_ASKED, _DRAFTED, _DRAFTS, _CONFIRMED = range(4)  # of a stage
Ints = npt.NDArray[np.int64]


class Tally:
    """Of all requests together, and of each what its acceptance rate takes.

    Args:
        num_stages: M; 0: stages are not told apart.
    """

    def __init__(self, num_slots: int, max_num_draft: int, num_stages: int, device: torch.device):
        width = max_num_draft + 2
        # Requests by (1 + tokens verified, tokens that came out); by (whether any was wanted, tokens drafted).
        # Then of stages, and tokens that were drawn from logits that are not finite.
        self._shapes = (width, width), (2, width), (num_stages, 3, max_num_draft), (num_stages, 4), (1,)
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._totals = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=device)  # the last is of nothing
        self._starts, self._width, self._nothing = np.cumsum([0, *sizes]).tolist(), width, sum(sizes)
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

    def add_fates(self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """What became of the last drafts, [R] each."""
        verified = num_sampled + num_rejected
        self._add(0, torch.add(num_sampled, verified, alpha=self._width))
        pairs = torch.stack((verified, num_sampled), dim=1).sub_(1).clamp_(min=0) * self._once[: len(slots), None]
        self._by_slot.index_add_(0, slots, pairs)

    def add_drafts(self, wanted: torch.Tensor, num_draft: torch.Tensor) -> None:
        """New drafts, [R] each."""
        self._add(1, torch.add(num_draft, wanted > 0, alpha=self._width))

    def add_stages(
        self,
        accepted: torch.Tensor,  # [R], of the last drafts
        verified: torch.Tensor,  # [R]
        sent_stage: torch.Tensor,  # [R, K]
        drafts: DraftArrays,
        told: Sequence[torch.Tensor],  # [R] of each stage: tokens that it drafted, -1 where it was not asked
        confirmed: torch.Tensor,  # [R], of the first stage
    ) -> None:
        """The same by stage."""
        places, K = columns(sent_stage), sent_stage.shape[1]
        for kind, stage, ends in (
            (_VERIFIED, sent_stage, verified),
            (_ACCEPTED, sent_stage, torch.minimum(accepted, verified)),
            (_KEPT, drafts.stage, drafts.num_draft),
        ):
            cells = (3 * stage + kind) * K + places
            self._add(2, torch.where(places < ends[:, None], cells, self._nothing - self._starts[2]))
        for stage, tokens in enumerate(told):
            has_any = (drafts.is_drafted & (drafts.stage == stage)).any(dim=1)
            kept = confirmed if stage == 0 else torch.zeros_like(confirmed)
            own = torch.stack((tokens >= 0, tokens.clamp(min=0), has_any, kept)).long() * self._once[: len(tokens)]
            start = self._starts[3] + 4 * stage
            self._totals[start : start + 4] += own.sum(dim=1)

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

    def _add(self, part: int, cells: torch.Tensor) -> None:
        """Counts rows, or their tokens, in these cells of a part."""
        once = self._once[: len(cells)].view(-1, *[1] * (cells.dim() - 1)).expand_as(cells)
        self._totals.index_add_(0, (cells.long() + self._starts[part]).reshape(-1), once.reshape(-1))

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
            own.kept += int(kept.sum() + sums[_CONFIRMED])
            own.asked, own.drafted = own.asked + int(sums[_ASKED]), own.drafted + int(sums[_DRAFTED])
            own.drafts += int(sums[_DRAFTS])
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
