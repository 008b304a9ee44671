"""The shared budget in Triton: one program holds the whole batch in registers. It bisects for the smallest admitted
probability in 30 steps over the bits of the floats, without reading memory."""

import torch
import triton
import triton.language as tl

from . import Layout, tiles

_LARGEST = tl.constexpr(0x3F800000)  # the bits of 1.0; bits of floats from 0 on are in the floats' order
_TOKENS_A_WARP = 512  # 16 registers of a thread


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "budget"],
    do_not_specialize_on_alignment=["slots_ptr", "num_tokens_ptr"],
)
def _share_kernel(
    layout,
    # [S, K]
    accept_probs_ptr,
    # [R]
    slots_ptr,
    # [2, R]
    num_tokens_ptr,
    num_rows,
    num_slots,
    budget,
    num_bonus: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows, steps = tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0).to(tl.int64)
    num_draft = tl.load(num_tokens_ptr + rows, mask=inside, other=0)
    others = tl.load(num_tokens_ptr + num_rows + rows, mask=inside, other=0)
    survival, keys = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS, LANES), -1, tl.int32)
    for step in tl.static_range(0, K):
        is_draft = step < num_draft
        survival *= tl.load(accept_probs_ptr + slots * K + step, mask=is_draft, other=0.0)
        key = tl.where(is_draft, tl.minimum(survival.to(tl.int32, bitcast=True), _LARGEST), -1)
        keys = tl.where(steps == step, key[:, None], keys)
    low, high = tl.full((), 0, tl.int32), tl.full((), _LARGEST, tl.int32)
    while low < high:
        middle = (low + high + 1) >> 1
        is_enough = tl.sum(tl.sum((keys >= middle).to(tl.int32), axis=1), axis=0) >= budget
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    above, equals = tl.sum((keys > low).to(tl.int32), axis=1), tl.sum((keys == low).to(tl.int32), axis=1)
    left = budget - tl.sum(above, axis=0) - (tl.cumsum(equals, axis=0) - equals)
    admitted = above + tl.minimum(tl.maximum(left, 0), equals)

    logits, tokens = tl.where(inside, admitted + num_bonus, 0), tl.where(inside, admitted + others, 0)
    tl.store(layout.cu_num_logits, 0)
    tl.store(layout.query_start_loc, 0)
    tl.store(layout.cu_num_logits + 1 + rows, tl.cumsum(logits, axis=0), mask=rows < num_slots)
    tl.store(layout.query_start_loc + 1 + rows, tl.cumsum(tokens, axis=0), mask=rows < num_slots)
    for first in range(ROWS, num_slots, ROWS):
        tl.store(layout.cu_num_logits + 1 + first + rows, tl.sum(logits, axis=0), mask=first + rows < num_slots)
        tl.store(layout.query_start_loc + 1 + first + rows, tl.sum(tokens, axis=0), mask=first + rows < num_slots)


def share_budget(
    layout: Layout,
    accept_probs: torch.Tensor,  # [S, K]
    slots: torch.Tensor,  # [R]
    num_tokens: torch.Tensor,  # [2, R]
    budget: int,
    num_bonus: int,
) -> None:
    num_slots, width = accept_probs.shape
    rows, lanes = next(tile for tile in tiles(num_slots) if len(slots) <= tile), max(2, triton.next_power_of_2(width))
    num_warps = min(16, max(1, rows * lanes // _TOKENS_A_WARP))
    _share_kernel[(1,)](
        layout, accept_probs, slots, num_tokens, len(slots), num_slots, budget, num_bonus,
        K=width, LANES=lanes, ROWS=rows, num_warps=num_warps,
    )  # fmt: skip
