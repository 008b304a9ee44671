"""Acceptance probabilities in Triton, one launch for each operation: the arithmetic of reference.py, in float64.

Learning takes one program for each stage, which no other stage's numbers meet; it goes through the batch in tiles of
rows and adds to the records of all requests in their order. R: rows, S: slots, M: stages, F: features, K: most tokens.
"""

import math

import torch
import triton
import triton.language as tl

from . import (
    CURVATURE_DECAY,
    DECAY,
    FEWEST,
    FIRST_CURVATURE,
    NUM_FEATURES,
    NUM_GRADES,
    PRIOR_WEIGHT,
    SHARED_DECAY,
    STEP,
    Drafts,
    State,
)

# Tokens of a tile: of all rows' last drafts, and of a program's rows where each program has some.
_LEARNED, _RATED = 256, 32
_GRADES, _FEATURES = tl.constexpr(NUM_GRADES), tl.constexpr(NUM_FEATURES)
_DECAY, _LOG_SHARED_DECAY = tl.constexpr(DECAY), tl.constexpr(math.log(SHARED_DECAY))
_PRIOR_WEIGHT, _FEWEST, _STEP = tl.constexpr(PRIOR_WEIGHT), tl.constexpr(FEWEST), tl.constexpr(STEP)
_CURVATURE_DECAY = tl.constexpr(CURVATURE_DECAY)
_NEW_CURVATURE = tl.constexpr((1 - CURVATURE_DECAY) * FIRST_CURVATURE)

_NUMBERS = ["num_rows", "than", "depth"]


@triton.jit
def _features(state, slots, stage, grade, sure, places, mask, M: tl.constexpr):
    """[ROWS, LANES, F] of tokens [ROWS, LANES] of requests' slots [ROWS, 1]."""
    cell = stage * _GRADES + grade
    prior = tl.load(state.shared_accepted + cell, mask=mask, other=0.5)
    prior /= tl.load(state.shared_tried + cell, mask=mask, other=1.0)
    own = slots * (M * _GRADES) + cell
    record = tl.load(state.accepted + own, mask=mask, other=0.0) + _PRIOR_WEIGHT * prior
    record /= tl.load(state.tried + own, mask=mask, other=0.0) + _PRIOR_WEIGHT
    fewest = tl.full((1, 1), _FEWEST, tl.float64)
    record = tl.minimum(tl.maximum(record, fewest), 1.0 - fewest)
    feature = tl.arange(0, _FEATURES)[None, None, :]
    place = places.to(tl.float64) / 4.0 - 0.5
    sure = tl.log(tl.maximum(sure, 1.0)) - 1.5
    odds = tl.log(record / (1.0 - record))
    one = tl.full((1, 1, 1), 1.0, tl.float64)
    features = tl.where(feature == 1, sure[:, :, None], one)
    return tl.where(feature == 2, place[:, :, None], tl.where(feature == 3, odds[:, :, None], features))


@triton.jit
def _grades(sure):
    return (sure > 2.0).to(tl.int32) + (sure > 4.0).to(tl.int32) + (sure > 8.0).to(tl.int32)


@triton.jit
def _chances(features, weights):
    return 1.0 / (1.0 + tl.exp(-tl.sum(features * weights, axis=2)))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["slots_ptr", "sampled_ptr", "rejected_ptr"])
def _learn_kernel(
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
    """The model and the records of one stage."""
    stage, places, four = tl.program_id(0), tl.arange(0, LANES)[None, :], tl.arange(0, _GRADES)
    own = stage * _GRADES + four
    weights, curvature = tl.load(state.weights + own), tl.load(state.curvature + own)
    all_tried, all_right = tl.load(state.shared_tried + own), tl.load(state.shared_accepted + own)
    slopes, bends = tl.zeros((_FEATURES,), tl.float64), tl.zeros((_FEATURES,), tl.float64)
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
        sure = tl.load(state.sent_confidence + sent, mask=is_tried, other=1.0)
        is_right = is_tried & (places < accepted[:, None])
        grade = _grades(sure)
        features = _features(state, slots[:, None], stage, grade, sure, places, is_tried, M)
        accept_probs = _chances(features, weights[None, None, :])
        errors = tl.where(is_tried, is_right.to(tl.float64) - accept_probs, 0.0)
        slopes += tl.sum(tl.sum(errors[:, :, None] * features, axis=1), axis=0)
        spread = tl.where(is_tried, accept_probs * (1.0 - accept_probs), 0.0)
        bends += tl.sum(tl.sum(spread[:, :, None] * features * features, axis=1), axis=0)

        is_cell = grade[:, :, None] == four[None, None, :]
        tried = tl.sum((is_cell & is_tried[:, :, None]).to(tl.float64), axis=1)
        right = tl.sum((is_cell & is_right[:, :, None]).to(tl.float64), axis=1)
        is_new = tried > 0.0
        cells = slots[:, None] * (M * _GRADES) + own[None, :]
        old_tried = tl.load(state.tried + cells, mask=is_new, other=0.0)
        old_right = tl.load(state.accepted + cells, mask=is_new, other=0.0)
        tl.debug_barrier()  # other threads have read these for their tokens
        tl.store(state.tried + cells, old_tried * _DECAY + tried, mask=is_new)
        tl.store(state.accepted + cells, old_right * _DECAY + right, mask=is_new)
        # As if one draft after the other had been added.
        so_far, num_new = tl.cumsum(is_new.to(tl.float64), axis=0), tl.sum(is_new.to(tl.float64), axis=0)
        keep, later = tl.exp(num_new * _LOG_SHARED_DECAY), tl.exp((num_new[None, :] - so_far) * _LOG_SHARED_DECAY)
        all_tried = all_tried * keep + tl.sum(tried * later, axis=0)
        all_right = all_right * keep + tl.sum(right * later, axis=0)
    curvature = curvature * _CURVATURE_DECAY + bends + _NEW_CURVATURE
    tl.debug_barrier()
    tl.store(state.curvature + own, curvature)
    tl.store(state.weights + own, weights + _STEP * slopes / curvature)
    tl.store(state.shared_tried + own, all_tried)
    tl.store(state.shared_accepted + own, all_right)


@triton.jit
def _rated(state, slots, stage, sure, places, mask, M: tl.constexpr):
    """[ROWS, LANES] chances, 0 where there is no token."""
    features = _features(state, slots[:, None], stage, _grades(sure), sure, places, mask, M)
    four = tl.arange(0, _FEATURES)[None, None, :]
    weights = tl.load(state.weights + stage[:, :, None] * _FEATURES + four, mask=mask[:, :, None], other=0.0)
    return tl.where(mask, _chances(features, weights), 0.0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["slots_ptr", "chances_ptr"])
def _predict_kernel(
    # [R, K]
    chances_ptr,
    state,
    slots_ptr,
    drafts,
    num_rows,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Chances of some rows' drafts, which are kept."""
    rows, places = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    num_draft = tl.load(drafts.num_draft + rows, mask=inside, other=0)
    mask, tokens = places < num_draft[:, None], rows[:, None] * K + places
    stage = tl.load(drafts.stage + tokens, mask=mask, other=0).to(tl.int32)
    sure = tl.load(drafts.confidence + tokens, mask=mask, other=1).to(tl.float64)
    accept_probs = _rated(state, slots, stage, sure, places, mask, M)
    tl.store(chances_ptr + tokens, accept_probs, mask=inside[:, None] & (places < K))
    sent = slots[:, None] * K + places
    tl.store(state.num_sent + slots, num_draft.to(tl.int32), mask=inside)
    tl.store(state.sent_stage + sent, stage, mask=mask)
    tl.store(state.sent_confidence + sent, sure, mask=mask)


@triton.jit
def _expected(rate, num_draft):
    """Tokens accepted of so many, 0 of fewer than one."""
    rest = tl.maximum(1.0 - rate, tl.full((1, 1), 1e-6, tl.float64))
    return tl.where(num_draft > 0, rate * (1.0 - tl.exp(tl.log(rate) * num_draft)) / rest, 0.0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["slots_ptr", "kept_ptr"])
def _worth_kernel(
    # [R] int32
    kept_ptr,
    state,
    slots_ptr,
    drafts,
    than,
    depth,
    num_rows,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """How many tokens of some rows' drafts to keep."""
    rows, places = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    num_draft = tl.load(drafts.num_draft + rows, mask=inside, other=0)
    mask, tokens = places < num_draft[:, None], rows[:, None] * K + places
    stage = tl.load(drafts.stage + tokens, mask=mask, other=0).to(tl.int32)
    sure = tl.load(drafts.confidence + tokens, mask=mask, other=1).to(tl.float64)
    survival = tl.cumprod(_rated(state, slots, stage, sure, places, mask, M), axis=1)

    other = than * _GRADES + tl.arange(0, _GRADES)
    prior = tl.sum(tl.load(state.shared_accepted + other), axis=0) / tl.sum(tl.load(state.shared_tried + other), axis=0)
    cells = slots[:, None] * (M * _GRADES) + other[None, :]
    right = tl.sum(tl.load(state.accepted + cells), axis=1) + _PRIOR_WEIGHT * prior
    rate = (right / (tl.sum(tl.load(state.tried + cells), axis=1) + _PRIOR_WEIGHT))[:, None]
    ends = places + 1
    worth = tl.cumsum(survival, axis=1) + survival * _expected(rate, depth - ends)
    worth = tl.where(mask, worth + ends * 1e-6, -1.0)  # the draft's own, among equals
    others = tl.sum(_expected(rate, depth + ends * 0) * (places == 0), axis=1)  # without a draft
    best = tl.where(tl.max(worth, axis=1) > others, tl.argmax(worth, axis=1) + 1, 0)
    tl.store(kept_ptr + rows, best, mask=inside)


def _whole(drafts: Drafts) -> Drafts:
    """Rows that follow each other."""
    return Drafts(*(part.contiguous() for part in drafts))


def _tiles(state: State, num_tokens: int) -> dict[str, int]:
    """Constants of a launch whose tiles have so many tokens."""
    width = state.sent_stage.shape[1]
    lanes = max(2, triton.next_power_of_2(width))  # Triton 3.6 cannot compile a scan over one token
    return {"K": width, "M": len(state.weights), "LANES": lanes, "ROWS": max(1, num_tokens // lanes)}


def learn(
    state: State,
    slots: torch.Tensor,  # [R]
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
) -> None:
    """See the front door."""
    tiles = _tiles(state, _LEARNED)
    _learn_kernel[(len(state.weights),)](state, slots, num_sampled, num_rejected, len(slots), **tiles, num_warps=4)


def predict(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    accept_probs: torch.Tensor,  # [R, K]
) -> None:
    """See the front door."""
    tiles = _tiles(state, _RATED)
    grid = (triton.cdiv(len(slots), tiles["ROWS"]),)
    _predict_kernel[grid](accept_probs, state, slots, _whole(drafts), len(slots), **tiles, num_warps=1)


def num_worth(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    than: int,
    depth: int,
) -> torch.Tensor:
    """See the front door."""
    tiles = _tiles(state, _RATED)
    grid = (triton.cdiv(len(slots), tiles["ROWS"]),)
    kept = slots.new_empty(len(slots), dtype=torch.int32)
    _worth_kernel[grid](kept, state, slots, _whole(drafts), than, depth, len(slots), **tiles, num_warps=1)
    return kept
