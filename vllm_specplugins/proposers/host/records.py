"""What `Records` does."""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import compiled, inlined

GRADES = 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 31.0  # each grade's largest, but for the last one's
NUM_GRADES = len(GRADES) + 1

_counts, _table = types.float64[:, :, ::1], types.float64[:, ::1]
_whole, _rows = types.float64[:, ::1], types.int64[::1]
_real = types.float64


records_type = types.Tuple((_counts, _counts, _table, _table, _real))


@inlined
def grade_of(sure: float) -> int:
    """How sure, in few steps: a match of 2 tokens is right every other time, one of 32 hardly ever wrong."""
    grade = 0
    for above in GRADES:
        grade += int(sure > above)
    return grade


@inlined
def chance(records: Any, row: int, stage: int, sure: float) -> float:
    """See Records.chances; of one token."""
    tried, accepted, shared_tried, shared_accepted, weight = records
    grade = grade_of(sure)
    prior = shared_accepted[stage, grade] / shared_tried[stage, grade]
    found: float = (accepted[row, stage, grade] + weight * prior) / (tried[row, stage, grade] + weight)
    return found


@compiled(types.void(_table, records_type, _rows, types.int64, _table))
def chances(out: Any, records: Any, rows: Any, stage: int, confidence: Any) -> None:
    """See Records.chances; of one stage."""
    for index in range(len(rows)):
        for place in range(confidence.shape[1]):
            out[index, place] = chance(records, rows[index], stage, confidence[index, place])


@compiled(
    types.void(
        *(_counts, _counts, _table, _table, _whole, _rows, types.int64[:, ::1], _table),
        *(_rows, _rows, _real, _real),
    )
)
def add(
    tried: Any,
    accepted: Any,
    shared_tried: Any,
    shared_accepted: Any,
    whole: Any,
    rows: Any,
    stages: Any,
    confidence: Any,
    num_draft: Any,
    num_accepted: Any,
    decay: float,
    shared: float,
) -> None:
    """See Records.add; one draft after the other."""
    for index in range(len(rows)):
        row, length, num_right = rows[index], num_draft[index], num_accepted[index]
        last_cell = -1
        for place in range(min(length, num_right + 1)):
            sure, stage = confidence[index, place], stages[index, place]
            grade = grade_of(sure)
            if stage * NUM_GRADES + grade != last_cell:
                last_cell = stage * NUM_GRADES + grade
                tried[row, stage, grade] *= decay
                accepted[row, stage, grade] *= decay
                shared_tried[stage, grade] *= shared
                shared_accepted[stage, grade] *= shared
            is_right = place < num_right
            tried[row, stage, grade] += 1.0
            accepted[row, stage, grade] += is_right
            shared_tried[stage, grade] += 1.0
            shared_accepted[stage, grade] += is_right
        start = 0
        for place in range(1, length + 1):  # each stage's stretch
            if place == length or stages[index, place] != stages[index, start]:
                if num_right >= start:
                    whole[row, stages[index, start]] = place - start if num_right >= place else 0
                start = place
