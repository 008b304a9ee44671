"""The per-row work of a step in Triton, in one launch per operation, with the results of reference.py."""

import torch
import triton
import triton.language as tl

from . import KINDS, SUMS, Rows, Staged, Totals, Wanted

_ROWS, _TOKENS = 256, 512  # of a program
_KINDS, _SUMS = tl.constexpr(len(KINDS)), tl.constexpr(len(SUMS))


@triton.jit(do_not_specialize=["num_rows", "num_slots", "max_first", "max_second"])
def _limit_kernel(
    # [R] int64 and int32, written; and two of int32, or ()
    request_ptr,
    wanted_ptr,
    of_stages,
    # Rows
    rows,
    lengths_ptr,
    limits_ptr,
    max_tokens_ptr,
    mapping_ptr,
    num_rows,
    num_slots,
    # tokens of each stage
    max_first,
    max_second,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    slots = tl.load(rows.slots + index, mask=inside, other=0)
    requests = tl.minimum(slots, num_slots - 1)
    before, limits_ptr = tl.load(lengths_ptr + requests), limits_ptr + requests * WIDTH
    wanted = tl.minimum(tl.load(limits_ptr), tl.load(limits_ptr + 2) - before)
    wanted = tl.maximum(tl.minimum(wanted, tl.load(max_tokens_ptr)), 0)
    is_asked = (before <= tl.load(limits_ptr + 1)) & (tl.load(rows.num_sampled + index, mask=inside, other=0) > 0)
    tl.store(mapping_ptr + index, tl.where(slots < num_slots, slots, -1).to(tl.int32), mask=inside)
    tl.store(request_ptr + index, requests, mask=inside)
    wanted = tl.where(is_asked, wanted, 0)
    tl.store(wanted_ptr + index, wanted, mask=inside)
    if len(of_stages) > 0:
        first, second = wanted * tl.load(limits_ptr + 3), wanted * tl.load(limits_ptr + 4)
        tl.store(of_stages[0] + index, tl.minimum(first, max_first), mask=inside)
        tl.store(of_stages[1] + index, tl.minimum(second, max_second), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["mapping_ptr"])
def _newest_kernel(
    # [R] each, written
    result,
    mapping_ptr,
    computed_ptr,
    sampled_ptr,
    tables,
    num_rows,
    ROWS: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    mapping = tl.load(mapping_ptr + index, mask=inside, other=-1)
    slots = tl.maximum(mapping, 0)
    tl.store(result[0] + index, tl.load(sampled_ptr + slots).to(tl.int32), mask=inside)
    lengths = tl.where(mapping >= 0, tl.load(computed_ptr + slots) + 1, 0)
    tl.store(result[1] + index, lengths.to(tl.int64), mask=inside)
    for number in tl.static_range(len(tables)):
        tl.store(result[2 + number] + index, tl.load(tables[number] + slots), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _join_kernel(
    # tokens, lengths, stages, confidence and the second stage's lengths, written
    joined,
    # tokens, lengths and confidence
    first,
    # tokens and lengths, and their confidence, or None
    second,
    sure_ptr,
    num_rows,
    num_steps,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    rows, places = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside, offsets = rows < num_rows, rows[:, None] * K + places
    mask = inside[:, None] & (places < K)
    ends = tl.load(first[1] + rows, mask=inside, other=0)
    others = tl.load(second[1] + rows, mask=inside, other=0)
    token_ids = tl.load(first[0] + offsets, mask=mask, other=0)
    confidence = tl.load(first[2] + offsets, mask=mask, other=0).to(tl.float32)
    is_step, steps = mask & (places < num_steps), rows[:, None] * num_steps + places
    second_ids, sure = tl.load(second[0] + steps, mask=is_step, other=0), (places + 1).to(tl.float32)
    if sure_ptr is not None:
        sure = tl.where(is_step, tl.load(sure_ptr + steps, mask=is_step, other=0.0), sure)
    if CONTINUES:
        start, num_draft = ends, tl.maximum(ends, others)
    else:
        start, num_draft = tl.where(ends > 0, K, 0), tl.where(ends > 0, ends, others)
    is_first = places < start[:, None]
    tl.store(joined[0] + offsets, tl.where(is_first, token_ids, second_ids), mask=mask)
    tl.store(joined[2] + offsets, tl.where(is_first, 0, 1), mask=mask)
    tl.store(joined[3] + offsets, tl.where(is_first, confidence, sure), mask=mask)
    tl.store(joined[1] + rows, num_draft, mask=inside)
    tl.store(joined[4] + rows, tl.where(num_draft > ends, num_draft - ends, -1), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _tally_kernel(
    totals,
    # Rows
    rows,
    wanted_ptr,
    num_draft_ptr,
    # Staged without `confirmed`, or None; and that
    staged,
    confirmed_ptr,
    num_rows,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
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
        sent_ptr, sent_stage_ptr, sampled_ptr, rejected_ptr, stage_ptr, looked_up_ptr, second_ptr = staged
        cells_ptr += 2 * WIDTH
        places = tl.arange(0, LANES)[None, :]
        accepted = tl.load(sampled_ptr + index, mask=inside, other=0) - 1
        tried = accepted + tl.load(rejected_ptr + index, mask=inside, other=0)
        tried = tl.maximum(tl.minimum(tl.load(sent_ptr + slots, mask=inside, other=0), tried), accepted)
        is_tried = (places < tried[:, None]) & inside[:, None]
        before = tl.load(sent_stage_ptr + slots[:, None] * K + places, mask=is_tried, other=0).to(tl.int32)
        is_draft = (places < num_draft[:, None]) & inside[:, None]
        stage = tl.load(stage_ptr + index[:, None] * K + places, mask=is_draft, other=0).to(tl.int32)
        one = tl.zeros((ROWS, LANES), tl.int64) + once
        tl.atomic_add(cells_ptr + (_KINDS * before * K + places), one, mask=is_tried, sem="relaxed")
        is_right = is_tried & (places < accepted[:, None])
        tl.atomic_add(cells_ptr + ((_KINDS * before + 1) * K + places), one, mask=is_right, sem="relaxed")
        tl.atomic_add(cells_ptr + ((_KINDS * stage + 2) * K + places), one, mask=is_draft, sem="relaxed")
        cells_ptr += 2 * _KINDS * K
        for number in tl.static_range(2):
            drafted_ptr = looked_up_ptr if number == 0 else second_ptr
            tokens = tl.load(drafted_ptr + index, mask=inside, other=-1)
            has_any = tl.max((is_draft & (stage == number)).to(tl.int32), axis=1)
            sums_ptr = cells_ptr + _SUMS * number
            tl.atomic_add(sums_ptr, tl.sum((tokens >= 0).to(tl.int64)) * once, sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(tl.maximum(tokens, 0).to(tl.int64)) * once, sem="relaxed")
            tl.atomic_add(sums_ptr + 2, tl.sum(has_any.to(tl.int64)) * once, sem="relaxed")
        if confirmed_ptr is not None:
            confirmed = tl.sum(tl.load(confirmed_ptr + index, mask=inside, other=0).to(tl.int64))
            tl.atomic_add(cells_ptr + 3, confirmed * once, sem="relaxed")


def limit(
    rows: Rows,
    lengths: torch.Tensor,  # [S]
    limits: torch.Tensor,  # [S, >= 3]
    step_limit: torch.Tensor,  # []
    mapping: torch.Tensor,  # [R]
    of_stages: tuple[int, ...],
) -> Wanted:
    num_rows, requests = len(rows.slots), torch.empty_like(rows.slots)
    wanted = torch.empty_like(requests, dtype=torch.int32)
    staged = tuple(torch.empty_like(wanted) for _ in of_stages)
    _limit_kernel[(triton.cdiv(num_rows, _ROWS),)](
        requests, wanted, staged, rows, lengths, limits, step_limit, mapping, num_rows, len(lengths),
        *(of_stages or (0, 0)), WIDTH=limits.shape[1], ROWS=_ROWS, num_warps=2,
    )  # fmt: skip
    return Wanted(requests, wanted, staged)


def newest(
    mapping: torch.Tensor,  # [R]
    num_computed: torch.Tensor,  # [S]
    last_sampled: torch.Tensor,  # [S]
    tables: tuple[torch.Tensor, ...],  # [S] each
) -> tuple[torch.Tensor, ...]:
    num_rows, dtypes = len(mapping), (torch.int32, torch.int64, *(table.dtype for table in tables))
    result = tuple(torch.empty_like(mapping, dtype=dtype) for dtype in dtypes)
    _newest_kernel[(triton.cdiv(num_rows, _ROWS),)](
        result, mapping, num_computed, last_sampled, tables, num_rows, ROWS=_ROWS, num_warps=2
    )
    return result


def join(
    first: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    continues: bool,
) -> tuple[torch.Tensor, ...]:
    (tokens, lengths, _), (second_ids, num_second, sure) = first, second
    (num_rows, width), confidence = tokens.shape, torch.empty_like(tokens, dtype=torch.float32)
    token_ids, num_draft, stage, last = (torch.empty_like(part) for part in (tokens, lengths, tokens, lengths))
    joined, lanes = (token_ids, num_draft, stage, confidence, last), triton.next_power_of_2(width)
    size = max(1, _TOKENS // lanes)
    _join_kernel[(triton.cdiv(num_rows, size),)](
        joined, first, (second_ids, num_second), sure, num_rows, second_ids.shape[1], K=width, LANES=lanes, ROWS=size,
        CONTINUES=continues, num_warps=4,
    )  # fmt: skip
    return joined


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
    *of_stages, confirmed = (part if part is None else part.contiguous() for part in staged or (None,))
    _tally_kernel[(triton.cdiv(num_rows, size),)](
        totals, rows, wanted, num_draft, tuple(of_stages) or None, confirmed, num_rows,
        K=max_num_draft, LANES=lanes, ROWS=size, num_warps=4,
    )  # fmt: skip
