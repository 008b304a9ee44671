"""Compiled loops of `DraftArrays`."""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import compiled

_drafts = types.int32[:, ::1], types.int64[::1], types.int64[:, ::1], types.float64[:, ::1]


@compiled(types.void(types.int64, types.float64[::1], types.int64[:, ::1], types.float64[:, ::1]))
def label(index: int, first_confidence: Any, stages: Any, confidences: Any) -> None:
    """See draft_arrays.of_stage; into `stages` and `confidences`."""
    for row in range(len(first_confidence)):
        for place in range(stages.shape[1]):
            stages[row, place] = index
            confidences[row, place] = first_confidence[row] + place


@compiled(types.void(*_drafts, *_drafts, *_drafts))
def join(
    token_ids: Any,
    num_draft: Any,
    stages: Any,
    confidences: Any,
    other_ids: Any,
    num_other: Any,
    other_stages: Any,
    other_confidences: Any,
    joined_ids: Any,
    num_joined: Any,
    joined_stages: Any,
    joined_confidences: Any,
) -> None:
    """See DraftArrays.followed_by; without q."""
    width = token_ids.shape[1]
    for row in range(len(num_draft)):
        end = num_draft[row]
        num_joined[row] = end + num_other[row]
        for place in range(width):
            if place < end:
                joined_ids[row, place] = token_ids[row, place]
                joined_stages[row, place] = stages[row, place]
                joined_confidences[row, place] = confidences[row, place]
            else:
                joined_ids[row, place] = other_ids[row, place - end]
                joined_stages[row, place] = other_stages[row, place - end]
                joined_confidences[row, place] = other_confidences[row, place - end]
