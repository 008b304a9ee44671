"""The acceptance model in loops that Numba compiles, over a State of NumPy arrays, with the results of reference.py.
The loops also count the stages' tokens, as kernels/steps does on the device, since they visit each token of a step."""

from typing import Any

import numpy as np
from numba import types

from ..compiled import compiled, inlined
from ..steps import ACCEPTED, DRAFTS, KEPT, VERIFIED
from . import BIN_ENDS, DECAY, MAX_STEP_TOKENS, SHARED_DECAY, Drafts, State
from . import HOST_PRIOR_WEIGHT as PRIOR_WEIGHT

EXTENDED_DECAY = 0.95  # per part of a draft that was accepted
Ints, Reals = types.int64[::1], types.float64[:, ::1]
_counts, _table = types.float64[:, :, ::1], types.int64[:, ::1]
StateType = types.NamedTuple((_counts, _counts, Reals, Reals, types.int32[::1], types.int32[:, ::1], Reals), State)
DraftsType = types.NamedTuple((Ints, _table, Reals), Drafts)


@inlined
def bin_of(confidence: float) -> int:
    number = 0
    for end in BIN_ENDS:
        number += int(confidence > end if confidence >= 1 else (1 - confidence) * end**2 < 1)
    return number


@inlined
def accept_prob(state: Any, row: int, stage: int, confidence: float, weight: float = PRIOR_WEIGHT) -> float:
    number = bin_of(confidence)
    prior = state.shared_accepted[stage, number] / state.shared_tried[stage, number]
    accepted = state.accepted[row, stage, number] + weight * prior
    return float(accepted / (state.tried[row, stage, number] + weight))


@compiled(types.void(StateType, Ints, DraftsType, types.float64, Reals))
def predict(state: Any, rows: Any, drafts: Any, weight: float, accept_probs: Any) -> None:
    """Writes each token's acceptance probability, and 0 after a draft's end, to `accept_probs` [R, K]."""
    accept_probs[:] = 0.0
    for index in range(len(rows)):
        for place in range(drafts.num_draft[index]):
            stage, confidence = drafts.stage[index, place], drafts.confidence[index, place]
            accept_probs[index, place] = accept_prob(state, rows[index], stage, confidence, weight)


@compiled(types.void(StateType, Ints, DraftsType, types.int64[:, :, ::1], _table))
def keep(
    state: Any,
    rows: Any,  # [R]
    drafts: Any,
    by_place: Any,  # [M, KINDS, K], counts
    by_stage: Any,  # [M, SUMS], counts
) -> None:
    """Stores the newest drafts for `observe`, and counts them."""
    for index in range(len(rows)):
        row, num_draft = rows[index], drafts.num_draft[index]
        state.num_sent[row] = num_draft
        for place in range(num_draft):
            stage = drafts.stage[index, place]
            state.sent_stage[row, place], state.sent_confidence[row, place] = stage, drafts.confidence[index, place]
            by_place[stage, KEPT, place] += 1
            is_first = True
            for before in range(place):
                is_first &= drafts.stage[index, before] != stage
            by_stage[stage, DRAFTS] += is_first


@compiled(types.void(StateType, Ints, Ints, Ints, Ints, Reals, Reals, types.int64[:, :, ::1]))
def observe(
    state: Any,
    rows: Any,  # [R]
    num_verified: Any,  # [R]
    num_accepted: Any,  # [R]
    num_refused: Any,  # [R], tokens after the verified ones that count as tried and rejected
    whole: Any,  # [S, M], the length of a stage's part of the newest draft if all of it was accepted, else 0; written
    extended: Any,  # [M, 2], of parts that were accepted: their fading number, and that of accepted tokens after them
    by_place: Any,  # [M, KINDS, K], counts
) -> None:
    """Counts the outcome of the newest drafts, and drops the drafts."""
    shape = state.shared_tried.shape
    tried, accepted, all_tried, all_accepted = np.zeros((4, *shape))
    for index in range(len(rows)):
        row, num_right = rows[index], num_accepted[index]
        length = min(state.num_sent[row], num_verified[index] + num_refused[index])
        state.num_sent[row] = start = 0
        tried[:] = accepted[:] = 0.0
        for place in range(length):
            stage, end = state.sent_stage[row, place], place + 1
            by_place[stage, VERIFIED, place] += place < num_verified[index]
            by_place[stage, ACCEPTED, place] += place < num_right
            if place <= num_right:
                number = bin_of(state.sent_confidence[row, place])
                tried[stage, number] += 1.0
                accepted[stage, number] += place < num_right
            if end == length or state.sent_stage[row, end] != stage:
                if num_right >= start:
                    whole[row, stage] = end - start if num_right >= end else 0
                if num_right >= end:
                    extended[stage, 0] = EXTENDED_DECAY * extended[stage, 0] + 1
                    extended[stage, 1] = EXTENDED_DECAY * extended[stage, 1] + num_right - end
                start = end
        all_tried += tried
        all_accepted += accepted
        for cell in np.ndindex(shape):
            if tried[cell] > 0:
                state.tried[row][cell] = DECAY * state.tried[row][cell] + tried[cell]
                state.accepted[row][cell] = DECAY * state.accepted[row][cell] + accepted[cell]
    for cell in np.ndindex(shape):
        if all_tried[cell] > 0:
            share = min(1.0, MAX_STEP_TOKENS / all_tried[cell])
            state.shared_tried[cell] = SHARED_DECAY * state.shared_tried[cell] + share * all_tried[cell]
            state.shared_accepted[cell] = SHARED_DECAY * state.shared_accepted[cell] + share * all_accepted[cell]
