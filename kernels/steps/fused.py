"""The rows of a step in Triton, one launch for each operation: the same numbers as reference.py's."""

import torch
import triton
import triton.language as tl

from . import KINDS, SUMS, Rows, Staged, Totals

_ROWS, _TOKENS = 256, 512  # of a program
_KINDS, _SUMS = tl.constexpr(len(KINDS)), tl.constexpr(len(SUMS))


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _limit_kernel(
    # [R] int64 and int32, written
    own_ptr,
    wanted_ptr,
    # Rows
    rows,
    lengths_ptr,
    limits_ptr,
    most_ptr,
    mapping_ptr,
    num_rows,
    num_slots,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of some rows."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    slots = tl.load(rows.slots + index, mask=inside, other=0)
    own = tl.minimum(slots, num_slots - 1)
    before, limits_ptr = tl.load(lengths_ptr + own), limits_ptr + own * WIDTH
    wanted = tl.minimum(tl.load(limits_ptr), tl.load(limits_ptr + 2) - before)
    wanted = tl.maximum(tl.minimum(wanted, tl.load(most_ptr)), 0)
    is_asked = (before <= tl.load(limits_ptr + 1)) & (tl.load(rows.num_sampled + index, mask=inside, other=0) > 0)
    tl.store(mapping_ptr + index, tl.where(slots < num_slots, slots, -1).to(tl.int32), mask=inside)
    tl.store(own_ptr + index, own, mask=inside)
    tl.store(wanted_ptr + index, tl.where(is_asked, wanted, 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _tally_kernel(
    totals,
    # Rows
    rows,
    wanted_ptr,
    num_draft_ptr,
    # Staged, or None
    staged,
    num_rows,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Counts some rows."""
    WIDTH: tl.constexpr = K + 2
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, once = index < num_rows, tl.load(totals.once)
    slots = tl.load(rows.slots + index, mask=inside, other=0)
    sampled = tl.load(rows.num_sampled + index, mask=inside, other=0)
    verified = sampled + tl.load(rows.num_rejected + index, mask=inside, other=0)
    num_draft = tl.load(num_draft_ptr + index, mask=inside, other=0).to(tl.int32)
    has_wanted = (tl.load(wanted_ptr + index, mask=inside, other=0) > 0).to(tl.int32)
    each = tl.zeros((ROWS,), tl.int64) + once
    tl.atomic_add(totals.cells + (sampled + WIDTH * verified), each, mask=inside, sem="relaxed")
    cells_ptr = totals.cells + WIDTH * WIDTH
    tl.atomic_add(cells_ptr + (num_draft + WIDTH * has_wanted), each, mask=inside, sem="relaxed")
    pair_ptr = totals.by_slot + 2 * slots
    tl.atomic_add(pair_ptr, tl.maximum(verified - 1, 0).to(tl.int64) * once, mask=inside, sem="relaxed")
    tl.atomic_add(pair_ptr + 1, tl.maximum(sampled - 1, 0).to(tl.int64) * once, mask=inside, sem="relaxed")
    if staged is not None:
        cells_ptr += 2 * WIDTH
        places = tl.arange(0, LANES)[None, :]
        accepted = tl.load(staged.num_sampled + index, mask=inside, other=0) - 1
        tried = accepted + tl.load(staged.num_rejected + index, mask=inside, other=0)
        tried = tl.maximum(tl.minimum(tl.load(staged.num_sent + slots, mask=inside, other=0), tried), accepted)
        is_tried = (places < tried[:, None]) & inside[:, None]
        before = tl.load(staged.sent_stage + slots[:, None] * K + places, mask=is_tried, other=0).to(tl.int32)
        is_kept = (places < num_draft[:, None]) & inside[:, None]
        stage = tl.load(staged.stage + index[:, None] * K + places, mask=is_kept, other=0).to(tl.int32)
        one = tl.zeros((ROWS, LANES), tl.int64) + once
        tl.atomic_add(cells_ptr + (_KINDS * before * K + places), one, mask=is_tried, sem="relaxed")
        is_right = is_tried & (places < accepted[:, None])
        tl.atomic_add(cells_ptr + ((_KINDS * before + 1) * K + places), one, mask=is_right, sem="relaxed")
        tl.atomic_add(cells_ptr + ((_KINDS * stage + 2) * K + places), one, mask=is_kept, sem="relaxed")
        cells_ptr += 2 * _KINDS * K
        for number in tl.static_range(2):
            told_ptr = staged.looked_up if number == 0 else staged.exited
            tokens = tl.load(told_ptr + index, mask=inside, other=-1)
            has_any = tl.max((is_kept & (stage == number)).to(tl.int32), axis=1)
            sums_ptr = cells_ptr + _SUMS * number
            tl.atomic_add(sums_ptr, tl.sum((tokens >= 0).to(tl.int64)) * once, sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(tl.maximum(tokens, 0).to(tl.int64)) * once, sem="relaxed")
            tl.atomic_add(sums_ptr + 2, tl.sum(has_any.to(tl.int64)) * once, sem="relaxed")
        confirmed = tl.sum(tl.load(staged.confirmed + index, mask=inside, other=0).to(tl.int64))
        tl.atomic_add(cells_ptr + 3, confirmed * once, sem="relaxed")


def limit(
    rows: Rows,
    lengths: torch.Tensor,  # [S]
    limits: torch.Tensor,  # [S, >= 3]
    most: torch.Tensor,  # []
    mapping: torch.Tensor,  # [R]
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, own = len(rows.slots), torch.empty_like(rows.slots)
    wanted = torch.empty_like(own, dtype=torch.int32)
    _limit_kernel[(triton.cdiv(num_rows, _ROWS),)](
        own, wanted, rows, lengths, limits, most, mapping, num_rows, len(lengths), WIDTH=limits.shape[1], ROWS=_ROWS,
        num_warps=2,
    )  # fmt: skip
    return own, wanted


def tally(
    totals: Totals,
    rows: Rows,
    wanted: torch.Tensor,  # [R]
    num_draft: torch.Tensor,  # [R]
    max_num_draft: int,
    staged: Staged | None,
) -> None:
    num_rows, lanes = len(wanted), triton.next_power_of_2(max_num_draft)
    size = _ROWS if staged is None else max(1, _TOKENS // lanes)
    if staged is not None:
        staged = Staged(*(part.contiguous() for part in staged))
    _tally_kernel[(triton.cdiv(num_rows, size),)](
        totals, rows, wanted, num_draft, staged, num_rows, K=max_num_draft, LANES=lanes, ROWS=size, num_warps=4
    )
