"""Compiled loops of `Ledger`. Of a stage are counted, in this order: tokens that go to the target, drafts that have any
of them, tokens that the target looked at."""

from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.kernels.acceptance import (
    DECAY,
    GRADES,
    MOST_OF_A_STEP,
    PRIOR_WEIGHT,
    SHARED_DECAY,
)
from vllm_specplugins.structures.compiled import compiled, inlined

KEPT, DRAFTS, VERIFIED = range(3)
NUM_TOTALS = 3

_ids, ints, reals, _counts = types.int32[::1], types.int64[::1], types.float64[:, ::1], types.float64[:, :, ::1]
_table = types.int64[:, ::1]
drafts_type = types.Tuple((ints, _table, reals))  # tokens of each; of each token its stage and confidence
_totals_type = types.Tuple((_table, _table))
records_type = types.Tuple((_counts, _counts, reals, reals, reals))


@inlined
def grade_of(confidence: float) -> int:
    """See GRADES."""
    grade = 0
    for above in GRADES:
        grade += int(confidence > above)
    return grade


@inlined
def accept_prob(records: Any, row: int, stage: int, confidence: float) -> float:
    """Of one token to be accepted, those before it being right."""
    tried, accepted, _, shared_tried, shared_accepted = records
    grade = grade_of(confidence)
    prior = shared_accepted[stage, grade] / shared_tried[stage, grade]
    found: float = (accepted[row, stage, grade] + PRIOR_WEIGHT * prior) / (tried[row, stage, grade] + PRIOR_WEIGHT)
    return found


@compiled(types.int64(ints, drafts_type, drafts_type, _totals_type, _ids, types.float32[::1], _ids))
def put(rows: Any, made: Any, sent: Any, totals: Any, lengths: Any, first_confidence: Any, last_stage: Any) -> int:
    """Keeps drafts, counts them, and fills the last three with what draft.Draft says of each; the longest's length."""
    num_draft, stages, confidence = made
    num_sent, sent_stages, sent_confidence = sent
    counts, longest = totals[0], 0
    for index in range(len(rows)):
        row, length = rows[index], num_draft[index]
        num_sent[row] = lengths[index] = length
        longest = max(longest, length)
        first_confidence[index] = confidence[index, 0] if length else 0.0
        last_stage[index] = stages[index, length - 1] if length else -1
        for place in range(length):
            stage = stages[index, place]
            sent_stages[row, place], sent_confidence[row, place] = stage, confidence[index, place]
            counts[stage, KEPT] += 1
            is_first = True
            for before in range(place):
                is_first &= stages[index, before] != stage
            counts[stage, DRAFTS] += is_first
    return longest


@compiled(types.void(ints, ints, ints, drafts_type, _totals_type, records_type))
def settle(rows: Any, num_draft: Any, num_accepted: Any, sent: Any, totals: Any, records: Any) -> None:
    """See Ledger.settle; tokens after the first rejected one were not tried."""
    num_sent, stages, confidence = sent
    counts, accepted_at = totals
    tried, accepted, whole, shared_tried, shared_accepted = records
    found, step = np.empty((2, *shared_tried.shape)), np.zeros((2, *shared_tried.shape))  # tried, accepted
    for index in range(len(rows)):
        row, num_right = rows[index], num_accepted[index]
        length = min(num_sent[row], num_draft[index])
        num_sent[row] = start = 0
        found[:] = 0.0
        for place in range(length):
            stage, is_right, end = stages[row, place], place < num_right, place + 1
            counts[stage, VERIFIED] += 1
            accepted_at[stage, place] += is_right
            if place <= num_right:
                grade = grade_of(confidence[row, place])
                found[0, stage, grade] += 1.0
                found[1, stage, grade] += is_right
            if end == length or stages[row, end] != stage:  # a stage's stretch
                if num_right >= start:
                    whole[row, stage] = end - start if num_right >= end else 0
                start = end
        step += found
        for stage, grade in np.ndindex(shared_tried.shape):
            if found[0, stage, grade] > 0:
                tried[row, stage, grade] = DECAY * tried[row, stage, grade] + found[0, stage, grade]
                accepted[row, stage, grade] = DECAY * accepted[row, stage, grade] + found[1, stage, grade]
    for stage, grade in np.ndindex(shared_tried.shape):
        new, right = step[0, stage, grade], step[1, stage, grade]
        if new > 0:
            share = min(1.0, MOST_OF_A_STEP / new)
            shared_tried[stage, grade] = SHARED_DECAY * shared_tried[stage, grade] + share * new
            shared_accepted[stage, grade] = SHARED_DECAY * shared_accepted[stage, grade] + share * right


@compiled(types.void(ints, ints, ints))
def add_lengths(lengths: Any, most: Any, totals: Any) -> None:
    """How often each length was chosen for requests that may have any."""
    for index in range(len(lengths)):
        if most[index] > 0:
            totals[lengths[index]] += 1
