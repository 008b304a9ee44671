"""Compiled loops of `PartialDraft.check`: what the stage's pass is fed, and what of the guess is kept."""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import compiled

_ids, _ints, _places = types.int32[:, ::1], types.int64[::1], types.int64[:, ::1]


@compiled(types.int64(_ints, _ints, _ints, types.boolean))
def num_fed(num_tokens: Any, ends: Any, num_guess: Any, is_first: bool) -> int:
    """How many tokens of each request a pass must feed: after those that were fed, or else the newest and all."""
    longest = 0
    for row in range(len(num_tokens)):
        if num_tokens[row] < ends[row]:
            longest = max(longest, 1 + num_guess[row] + (num_tokens[row] if is_first else 0))
    return longest


@compiled(types.void(_ids, _ints, _ints, _ids, _ints, types.int32[::1], _ints, types.int64, _ids, _ints, _ids, _places))
def feed(
    token_ids: Any,
    num_tokens: Any,
    ends: Any,
    guess_ids: Any,
    num_guess: Any,
    newest: Any,
    lengths: Any,
    max_position: int,
    text: Any,
    firsts: Any,
    fed: Any,
    positions: Any,
) -> None:
    """What is known and after it the guess, into `text` [R, K]; what of that is fed, into `firsts` [R], which tokens
    begin, and `fed` and `positions` [R, T].

    Args:
        newest: [R], each history's newest token.
        lengths: [R], of the histories.
    """
    width, num_fed = text.shape[1], fed.shape[1]
    for row in range(len(num_tokens)):
        known = num_tokens[row]
        for place in range(width):
            text[row, place] = token_ids[row, place] if place < known else guess_ids[row, place - known]
        num_text = known + num_guess[row]
        first = num_text + 1 - num_fed if known < ends[row] and num_text >= num_fed else 0
        firsts[row] = first
        for place in range(num_fed):
            fed[row, place] = text[row, first + place - 1] if first + place > 0 else newest[row]
            positions[row, place] = min(lengths[row] - 1 + first + place, max_position)


@compiled(types.UniTuple(types.int64, 2)(_ids, _ints, _ints, _ids, _ints, _ids, _ints, types.int64, _places))
def keep(
    token_ids: Any,
    num_tokens: Any,
    ends: Any,
    text: Any,
    num_guess: Any,
    choices: Any,
    firsts: Any,
    num_logits: int,
    q: Any,
) -> tuple[int, int]:
    """Goes on with what is known, by the stage's choices [R, T] after what was fed; how many tokens of the guesses
    were right, and how many are known now that were not."""
    num_kept, num_new = 0, 0
    for row in range(len(num_tokens)):
        known, first = num_tokens[row], firsts[row]
        if known >= ends[row]:
            continue
        right, end = known, known + num_guess[row]
        while right < end and choices[row, right - first] == text[row, right]:
            right += 1
        num_tokens[row] = min(right + 1, ends[row])
        for place in range(known, num_tokens[row]):
            token_ids[row, place] = choices[row, place - first]
            q[row, place] = num_logits + row * choices.shape[1] + place - first
        num_kept += right - known
        num_new += num_tokens[row] - known
    return num_kept, num_new
