"""Compiled loops of `DraftArrays`."""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import compiled

_drafts = types.int32[:, ::1], types.int64[::1], types.int64[:, ::1], types.float64[:, ::1]


@compiled(types.void(types.int64, types.float64[::1], types.int64[:, ::1], types.float64[:, ::1]))
def label(index: int, first_sure: Any, stages: Any, sure: Any) -> None:
    """See drafted.of_stage; into `stages` and `sure`."""
    for row in range(len(first_sure)):
        for place in range(stages.shape[1]):
            stages[row, place] = index
            sure[row, place] = first_sure[row] + place


@compiled(types.void(*_drafts, *_drafts, *_drafts))
def join(
    token_ids: Any,
    num_draft: Any,
    stages: Any,
    sure: Any,
    behind_ids: Any,
    num_behind: Any,
    behind_stages: Any,
    behind_sure: Any,
    joined_ids: Any,
    num_joined: Any,
    joined_stages: Any,
    joined_sure: Any,
) -> None:
    """See DraftArrays.followed_by; without q."""
    width = token_ids.shape[1]
    for row in range(len(num_draft)):
        end = num_draft[row]
        num_joined[row] = end + num_behind[row]
        for place in range(width):
            if place < end:
                joined_ids[row, place] = token_ids[row, place]
                joined_stages[row, place] = stages[row, place]
                joined_sure[row, place] = sure[row, place]
            else:
                joined_ids[row, place] = behind_ids[row, place - end]
                joined_stages[row, place] = behind_stages[row, place - end]
                joined_sure[row, place] = behind_sure[row, place - end]
