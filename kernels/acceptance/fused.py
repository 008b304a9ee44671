"""The acceptance model in Triton, with one launch for each operation and the arithmetic of reference.py, in float64.
`observe` runs one program for each stage; no other program touches that stage's counts."""

import torch
import triton
import triton.language as tl

from . import BIN_ENDS, DECAY, MAX_STEP_TOKENS, NUM_BINS, PRIOR_WEIGHT, SHARED_DECAY, Drafts, Other, State, Worth

_OBSERVE_TOKENS, _PREDICT_TOKENS = 128, 32  # of a tile
_B, _BIN_LANES, _BIN_ENDS = (
    tl.constexpr(NUM_BINS),
    tl.constexpr(triton.next_power_of_2(NUM_BINS)),
    tl.constexpr(BIN_ENDS),
)
_DECAY, _SHARED_DECAY = tl.constexpr(DECAY), tl.constexpr(SHARED_DECAY)
_PRIOR_WEIGHT, _MAX_STEP_TOKENS = tl.constexpr(PRIOR_WEIGHT), tl.constexpr(MAX_STEP_TOKENS)


@triton.jit
def _bins(confidence):
    numbers = tl.zeros_like(confidence).to(tl.int32)
    for at in tl.static_range(0, _B - 1):
        is_match, is_more = confidence >= 1.0, (1.0 - confidence) * (_BIN_ENDS[at] * _BIN_ENDS[at]) < 1.0
        numbers += tl.where(is_match, confidence > _BIN_ENDS[at], is_more).to(tl.int32)
    return numbers


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "sampled_ptr", "rejected_ptr"])
def _observe_kernel(
    state,
    # [R] int64, int32, int32
    slots_ptr,
    sampled_ptr,
    rejected_ptr,
    num_rows,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    stage, places, bins = tl.program_id(0), tl.arange(0, LANES)[None, :], tl.arange(0, _BIN_LANES)
    shared, is_bin = stage * _B + bins, bins < _B
    all_tried = tl.zeros((_BIN_LANES,), tl.float64)
    all_right = tl.zeros((_BIN_LANES,), tl.float64)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < num_rows
        slots = tl.load(slots_ptr + rows, mask=inside, other=0)
        accepted = tl.maximum(tl.load(sampled_ptr + rows, mask=inside, other=0) - 1, 0)
        verified = accepted + tl.load(rejected_ptr + rows, mask=inside, other=0)
        verified = tl.minimum(tl.load(state.num_sent + slots, mask=inside, other=0), verified)
        is_tried = (places < verified[:, None]) & (places <= accepted[:, None])
        sent = slots[:, None] * K + places
        is_tried &= tl.load(state.sent_stage + sent, mask=is_tried, other=-1) == stage
        numbers = _bins(tl.load(state.sent_confidence + sent, mask=is_tried, other=1.0))
        is_cell = (numbers[:, :, None] == bins[None, None, :]) & is_tried[:, :, None]
        is_right = is_cell & (places < accepted[:, None])[:, :, None]
        tried, right = tl.sum(is_cell.to(tl.float64), axis=1), tl.sum(is_right.to(tl.float64), axis=1)
        is_new = tried > 0.0
        cells = slots[:, None] * (M * _B) + shared[None, :]
        old_tried = tl.load(state.tried + cells, mask=is_new, other=0.0)
        old_right = tl.load(state.accepted + cells, mask=is_new, other=0.0)
        tl.store(state.tried + cells, old_tried * _DECAY + tried, mask=is_new)
        tl.store(state.accepted + cells, old_right * _DECAY + right, mask=is_new)
        all_tried += tl.sum(tried, axis=0)
        all_right += tl.sum(right, axis=0)
    limit = tl.full((1,), _MAX_STEP_TOKENS, tl.float64)
    share, is_new = limit / tl.maximum(all_tried, limit), is_bin & (all_tried > 0.0)
    decay = tl.full((1,), _SHARED_DECAY, tl.float64)
    old_tried = tl.load(state.shared_tried + shared, mask=is_new, other=0.0)
    old_right = tl.load(state.shared_accepted + shared, mask=is_new, other=0.0)
    tl.store(state.shared_tried + shared, decay * old_tried + share * all_tried, mask=is_new)
    tl.store(state.shared_accepted + shared, decay * old_right + share * all_right, mask=is_new)


@triton.jit
def _accept_probs(state, slots, drafts, tokens, mask, M: tl.constexpr):
    """Returns the tokens' stage, confidence and acceptance probability; outside of the mask 0, except for a confidence
    of 1."""
    stage = tl.load(drafts.stage + tokens, mask=mask, other=0).to(tl.int32)
    confidence = tl.load(drafts.confidence + tokens, mask=mask, other=1).to(tl.float64)
    cell = stage * _B + _bins(confidence)
    prior = tl.load(state.shared_accepted + cell, mask=mask, other=0.0)
    prior /= tl.load(state.shared_tried + cell, mask=mask, other=1.0)
    cell += slots[:, None] * (M * _B)
    accepted = tl.load(state.accepted + cell, mask=mask, other=0.0) + _PRIOR_WEIGHT * prior
    return stage, confidence, accepted / (tl.load(state.tried + cell, mask=mask, other=0.0) + _PRIOR_WEIGHT)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "accept_probs_ptr"])
def _predict_kernel(
    # [R, K]
    accept_probs_ptr,
    state,
    slots_ptr,
    drafts,
    # two of [S, K], or None
    tables,
    num_rows,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KEEPS: tl.constexpr,
):
    rows, places = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    num_draft = tl.load(drafts.num_draft + rows, mask=inside, other=0)
    mask, tokens = places < num_draft[:, None], rows[:, None] * K + places
    stage, confidence, accept_probs = _accept_probs(state, slots, drafts, tokens, mask, M)
    written, sent = inside[:, None] & (places < K), slots[:, None] * K + places
    tl.store(accept_probs_ptr + tokens, accept_probs, mask=written)
    if tables is not None:
        tl.store(tables[0] + sent, accept_probs, mask=written)
        tl.store(tables[1] + sent, accept_probs, mask=written)
    if KEEPS:
        tl.store(state.num_sent + slots, num_draft.to(tl.int32), mask=inside)
        tl.store(state.sent_stage + sent, stage, mask=mask)
        tl.store(state.sent_confidence + sent, confidence, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "other", "depth"], do_not_specialize_on_alignment=["slots_ptr", "asked_ptr"])
def _worth_kernel(
    # Worth, written
    result,
    state,
    slots_ptr,
    drafts,
    # [R], or None: no other stage drafts
    asked_ptr,
    other,
    depth,
    # [S, 2] or None, written
    reports_ptr,
    num_rows,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    """Lane n represents the first n tokens of a row's draft."""
    rows, ends = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside, is_token = rows < num_rows, ends > 0
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    num_draft = tl.load(drafts.num_draft + rows, mask=inside, other=0).to(tl.int32)
    mask = is_token & (ends <= num_draft[:, None])
    _, _, accept_probs = _accept_probs(state, slots, drafts, rows[:, None] * K + ends - 1, mask, M)
    alive = tl.cumprod(tl.where(is_token, accept_probs, 1.0), axis=1)
    survival = tl.where(is_token, alive, 0.0)
    gain = tl.sum(survival, axis=1)
    tl.store(result.gain + rows, gain, mask=inside)
    if reports_ptr is not None:
        tl.store(reports_ptr + 2 * slots, gain.to(tl.float32), mask=inside)
    num_kept = num_draft
    if asked_ptr is not None:
        bins = tl.arange(0, _BIN_LANES)[None, :]
        shared, is_bin = other * _B + bins, bins < _B
        cells, is_cell = slots[:, None] * (M * _B) + shared, is_bin & inside[:, None]
        prior = tl.sum(tl.load(state.shared_accepted + shared, mask=is_bin, other=0.0), axis=1)
        prior /= tl.sum(tl.load(state.shared_tried + shared, mask=is_bin, other=0.0), axis=1)
        accepted = tl.sum(tl.load(state.accepted + cells, mask=is_cell, other=0.0), axis=1)
        tried = tl.sum(tl.load(state.tried + cells, mask=is_cell, other=0.0), axis=1)
        rate = (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)
        if reports_ptr is not None:
            tl.store(reports_ptr + 2 * slots + 1, rate.to(tl.float32), mask=inside)
        gains, others = rate * 0.0, alive * 0.0  # by the other stage's tokens: of some length, and after each end
        for length in range(1, depth + 1):
            gains = rate * (1.0 + gains)
            others = tl.where(depth - ends == length, gains[:, None], others)
        expected = tl.cumsum(survival, axis=1) + tl.where(is_token & (not CONTINUES), 0.0, alive * others)
        expected += 1e-6 * ends.to(tl.float64)  # among equals the draft's tokens
        best = tl.argmax(tl.where(ends <= num_draft[:, None], expected, -1.0), axis=1)
        num_kept = tl.where(tl.load(asked_ptr + rows, mask=inside, other=0) > 0, best, num_kept)
    tl.store(result.num_kept + rows, num_kept, mask=inside)


def _tiles(state: State, num_tokens: int, num_more: int = 0) -> dict[str, int]:
    width = state.sent_stage.shape[1]
    lanes = max(2, triton.next_power_of_2(width + num_more))  # Triton 3.6 cannot compile a scan over one token
    return {"K": width, "M": len(state.shared_tried), "LANES": lanes, "ROWS": max(1, num_tokens // lanes)}


def observe(
    state: State,
    slots: torch.Tensor,  # [R]
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
) -> None:
    tiles = _tiles(state, _OBSERVE_TOKENS)
    _observe_kernel[(len(state.shared_tried),)](
        state, slots, num_sampled, num_rejected, len(slots), **tiles, num_warps=4
    )


def predict(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    accept_probs: torch.Tensor,  # [R, K]
    keeps: bool,
    tables: tuple[torch.Tensor, ...],  # [S, K]
) -> None:
    tiles = _tiles(state, _PREDICT_TOKENS)
    grid = (triton.cdiv(len(slots), tiles["ROWS"]),)
    drafts = Drafts(*(part.contiguous() for part in drafts))
    _predict_kernel[grid](
        accept_probs, state, slots, drafts, tables or None, len(slots), **tiles, KEEPS=keeps, num_warps=1
    )


def worth(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    other: Other | None,
    reports: torch.Tensor | None,  # [S, 2], written
) -> Worth:
    tiles, drafts = _tiles(state, _PREDICT_TOKENS, 1), Drafts(*(part.contiguous() for part in drafts))
    result = Worth(state.tried.new_empty(len(slots)), torch.empty_like(drafts.num_draft, dtype=torch.int32))
    stage, depth, continues, asked = other or Other(0, 0, False, None)
    _worth_kernel[(triton.cdiv(len(slots), tiles["ROWS"]),)](
        result, state, slots, drafts, asked, stage, depth, reports, len(slots), **tiles,
        CONTINUES=continues, num_warps=1,
    )  # fmt: skip
    return result
