"""What `Accounts` does. Of a stage are counted, in this order: tokens that go to the target, drafts that have any of
them, tokens that the target looked at."""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import compiled

KEPT, DRAFTS, VERIFIED = range(3)
NUM_COUNTS = 3

_ids, _ints, _table, _reals = types.int32[::1], types.int64[::1], types.int64[:, ::1], types.float64[:, ::1]
_sent = _ints, _table, _reals


@compiled(types.int64(_ints, *_sent, *_sent, _table, _ids, types.float32[::1], _ids))
def put(
    rows: Any,
    num_draft: Any,
    stages: Any,
    sure: Any,
    kept_num_draft: Any,
    kept_stages: Any,
    kept_sure: Any,
    counts: Any,
    lengths: Any,
    first_sure: Any,
    last_stage: Any,
) -> int:
    """Keeps drafts, counts them, and fills the last three with what draft.Draft says of each; the longest's length."""
    longest = 0
    for index in range(len(rows)):
        row, length = rows[index], num_draft[index]
        kept_num_draft[row] = lengths[index] = length
        longest = max(longest, length)
        first_sure[index] = sure[index, 0] if length else 0.0
        last_stage[index] = stages[index, length - 1] if length else -1
        for place in range(stages.shape[1]):
            stage = stages[index, place]
            kept_stages[row, place], kept_sure[row, place] = stage, sure[index, place]
            if place < length:
                counts[stage, KEPT] += 1
                is_first = True
                for before in range(place):
                    is_first &= stages[index, before] != stage
                counts[stage, DRAFTS] += is_first
    return longest


@compiled(types.int64(_ints, _ints, _ints, *_sent, _table, _table, *_sent))
def take(
    rows: Any,
    num_draft: Any,
    num_accepted: Any,
    kept_num_draft: Any,
    kept_stages: Any,
    kept_sure: Any,
    counts: Any,
    accepted_at: Any,
    known: Any,
    stages: Any,
    sure: Any,
) -> int:
    """Fills the last three with what was kept and verified, counts it, and keeps it no longer; how many tokens."""
    total = 0
    for index in range(len(rows)):
        row = rows[index]
        known[index] = min(kept_num_draft[row], num_draft[index])
        kept_num_draft[row] = 0
        total += known[index]
        for place in range(stages.shape[1]):
            stage = kept_stages[row, place]
            stages[index, place], sure[index, place] = stage, kept_sure[row, place]
            if place < known[index]:
                counts[stage, VERIFIED] += 1
                accepted_at[stage, place] += place < num_accepted[index]
    return total


@compiled(types.void(_ints, _ints, _ints))
def add_lengths(lengths: Any, most: Any, totals: Any) -> None:
    """How often each length was chosen for requests that may have any."""
    for index in range(len(lengths)):
        if most[index] > 0:
            totals[lengths[index]] += 1
