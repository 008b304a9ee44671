"""The drafts that a cascade sent last, how many of their tokens were accepted, and acceptance by stage since.

The model of acceptance is that of kernels/acceptance, which has it for drafts on the device; here its loops are
compiled. One row of arrays for each request (SlotTable). R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.counters import StageCounters, count
from vllm_specplugins.draft import Draft, Int32Array
from vllm_specplugins.kernels.acceptance import (
    DECAY,
    FIRST_GUESSES,
    GRADES,
    MOST_OF_A_STEP,
    NUM_GRADES,
    SHARED_DECAY,
)
from vllm_specplugins.kernels.compiled import compiled, inlined
from vllm_specplugins.structures.arrays import DraftArrays, Ints, dense_logits, with_room

# As in kernels/acceptance, but half as much: here a draft is chosen for each request, and what fails has to end soon.
PRIOR_WEIGHT = 4.0
KEPT, DRAFTS, VERIFIED = range(3)  # of a stage: tokens that go to the target, drafts that have any, tokens it looked at


class Ledger:
    """See the module. It grows with the requests."""

    def __init__(self, num_stages: int, max_num_draft: int):
        self._sent = np.zeros(1, np.int64), np.zeros((1, max_num_draft), np.int64), np.zeros((1, max_num_draft))
        places = np.zeros((num_stages, max_num_draft), np.int64)
        self._totals = np.zeros((num_stages, 3), np.int64), places
        self._lengths = np.zeros((num_stages, max_num_draft + 1), np.int64)
        shape = num_stages, NUM_GRADES
        self._own = np.zeros((1, *shape)), np.zeros((1, *shape)), np.zeros((1, num_stages))
        tried = np.full(shape, PRIOR_WEIGHT)
        self._shared = tried, tried * np.array(FIRST_GUESSES)

    @property
    def records(self) -> tuple[Any, ...]:
        """What the compiled functions go by: of each request, stage and grade the tokens tried and accepted, the length
        of a stage's last draft if all of it was accepted, and tokens tried and accepted of all requests."""
        return *self._own, *self._shared

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        if num_rows > len(self._sent[0]):
            num_sent, stages, confidence = (with_room(array, num_rows) for array in self._sent)
            tried, accepted, whole = (with_room(array, num_rows) for array in self._own)
            self._sent, self._own = (num_sent, stages, confidence), (tried, accepted, whole)

    def put(self, rows: Ints, drafts: DraftArrays) -> Draft:
        """Keeps and counts the newest drafts, of requests that have these rows; the same as one draft."""
        num_reqs = len(rows)
        num_draft, confidence = np.empty(num_reqs, np.int32), np.empty(num_reqs, np.float32)
        made = drafts.num_draft, drafts.stage, drafts.confidence
        max_length = _put(rows, made, self._sent, self._totals, num_draft, confidence)
        return Draft(drafts.token_ids[:, :max_length], num_draft, confidence, dense_logits(drafts, max_length))

    def settle(self, rows: Ints, num_draft: Int32Array, num_accepted: Int32Array) -> None:
        """What became of these drafts: counted, learned from, and not kept any longer.

        Args:
            num_draft, num_accepted: [R], tokens verified and accepted.
        """
        fates = num_draft.astype(np.int64), num_accepted.astype(np.int64)
        _settle(rows, *fates, self._sent, self._totals, self.records)

    def went_on(self, rows: Ints, num_accepted: Int32Array, stage: int, least: int) -> bool:
        """Whether of each request a draft of so many tokens or more was accepted whole, whose last one was not of this
        stage."""
        num_sent, stages, _ = self._sent
        num_draft = num_sent[rows]
        last = stages[rows, np.maximum(num_draft, 1) - 1]
        return bool(((num_draft >= least) & (num_draft == num_accepted) & (last != stage)).all())

    def has_tried(self, stage: int) -> bool:
        """Whether as many first tokens of a stage have been tried as its first guess counts for."""
        return bool(self._shared[0][stage, 0] >= 2 * PRIOR_WEIGHT)

    def num_kept(self, stage: int) -> int:
        """Tokens of a stage that went to the target, since the counts were moved."""
        return int(self._totals[0][stage, KEPT])

    def clear(self, rows: Ints) -> None:
        """Forgets these requests."""
        for array in (self._sent[0], *self._own):
            array[rows] = 0

    def add_lengths(self, stage: int, lengths: Ints, max_own: Ints) -> None:
        """Counts the lengths that a gate chose for the requests that may have any of this stage."""
        self._lengths[stage] += np.bincount(lengths[max_own > 0], minlength=self._lengths.shape[1])

    def move_to(self, counters: Sequence[StageCounters]) -> None:
        """Adds the counts to those of the stages, and begins anew."""
        tables = *self._totals, self._lengths
        for own, totals, accepted_at, lengths in zip(counters, *(table.tolist() for table in tables), strict=True):
            own.kept += totals[KEPT]
            own.drafts += totals[DRAFTS]
            own.verified += totals[VERIFIED]
            own.accepted += sum(accepted_at)
            for known, found in ((own.accepted_at, accepted_at), (own.gate_lengths, lengths)):
                for index, more in enumerate(found):
                    if more:
                        count(known, index, more)
        for table in tables:
            table[:] = 0


_ids, ints, reals, _counts = types.int32[::1], types.int64[::1], types.float64[:, ::1], types.float64[:, :, ::1]
_table = types.int64[:, ::1]
drafts_type = types.Tuple((ints, _table, reals))  # tokens of each; of each token its stage and confidence
_totals_type = types.Tuple((_table, _table))
records_type = types.Tuple((_counts, _counts, reals, reals, reals))


@inlined
def grade_of(confidence: float) -> int:
    grade = 0
    for end in GRADES:
        grade += int(confidence > end if confidence >= 1 else (1 - confidence) * end**2 < 1)
    return grade


@inlined
def accept_prob(records: Any, row: int, stage: int, confidence: float) -> float:
    """Of one token to be accepted, those before it being right."""
    tried, accepted, _, shared_tried, shared_accepted = records
    grade = grade_of(confidence)
    prior = shared_accepted[stage, grade] / shared_tried[stage, grade]
    found: float = (accepted[row, stage, grade] + PRIOR_WEIGHT * prior) / (tried[row, stage, grade] + PRIOR_WEIGHT)
    return found


@compiled(types.int64(ints, drafts_type, drafts_type, _totals_type, _ids, types.float32[::1]))
def _put(rows: Any, made: Any, sent: Any, totals: Any, lengths: Any, first_confidence: Any) -> int:
    """Keeps drafts, counts them, and fills the last two with what draft.Draft says of each; the longest's length."""
    num_draft, stages, confidence = made
    num_sent, sent_stages, sent_confidence = sent
    counts, max_length = totals[0], 0
    for index in range(len(rows)):
        row, length = rows[index], num_draft[index]
        num_sent[row] = lengths[index] = length
        max_length = max(max_length, length)
        first_confidence[index] = confidence[index, 0] if length else 0.0
        for place in range(length):
            stage = stages[index, place]
            sent_stages[row, place], sent_confidence[row, place] = stage, confidence[index, place]
            counts[stage, KEPT] += 1
            is_first = True
            for before in range(place):
                is_first &= stages[index, before] != stage
            counts[stage, DRAFTS] += is_first
    return max_length


@compiled(types.void(ints, ints, ints, drafts_type, _totals_type, records_type))
def _settle(rows: Any, num_draft: Any, num_accepted: Any, sent: Any, totals: Any, records: Any) -> None:
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
