"""Prompt lookup of a batch on the host, compiled: nothing is kept of a text but how far back copying went on.

Where copying would go on is looked at first: as long as it does, no text is read. Else texts are searched by blocks. A
pass over a block compares one token more of the ending, as long as any place of it still matches: the work is bounded,
whatever a text holds, and a pass is vectorised. R: rows, K: most tokens of a draft, N: requests that are known.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ..compiled import compiled, inlined, text_at
from . import LONGEST_MATCH

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

BLOCK = 1024  # places
# Columns of `known`: see Texts.distances; where a request's reference lies, and how many tokens it has, or 0.
OWN, OTHER, REFERENCE, NUM_TOKENS = range(4)
NUM_COLUMNS = 4


@inlined
def _length_at(text: Int32Array, place: int, ending: Int32Array, num_ending: int) -> int:
    """How many tokens before a place are those that the text ends with."""
    n, most = 0, min(num_ending, place)
    while n < most and text[place - 1 - n] == ending[n]:
        n += 1
    return n


@inlined
def _first_pass(tokens: Int32Array, token: int, differs: Int32Array) -> bool:
    """Whether any token is this one; `differs` is 0 where."""
    found = False
    for i in range(tokens.size):
        differs[i] = tokens[i] ^ token
        if differs[i] == 0:
            found = True
    return found


@inlined
def _pass(tokens: Int32Array, token: int, before: Int32Array, differs: Int32Array) -> bool:
    """The same, of places that matched before."""
    found = False
    for i in range(tokens.size):
        difference = before[i] | (tokens[i] ^ token)
        differs[i] = difference
        if difference == 0:
            found = True
    return found


@inlined
def _match_block(text: Int32Array, start: int, size: int, ending: Int32Array, most: int, differs: Int32Array) -> Any:
    """How many tokens the longest match has before a place of a block, at most `most`; and the row of `differs` that is
    0 at such places."""
    newest = 0
    if not _first_pass(text[start - 1 : start - 1 + size], ending[0], differs[0]):
        return 0, 0
    for n in range(1, most):
        other, first = 1 - newest, max(0, n + 1 - start)  # of fewer tokens before a place none match
        differs[other, :first] = 1
        tokens = text[start - 1 - n + first : start - 1 - n + size]
        if not _pass(tokens, ending[n], differs[newest, first:size], differs[other, first:size]):
            return n, newest
        newest = other
    return most, newest


@inlined
def _nearest_match(
    text: Int32Array,
    ending: Int32Array,
    num_ending: int,
    min_ngram: int,
    max_ngram: int,
    expected: int,
    differs: Int32Array,
) -> Any:
    """Where the text goes on after the longest match, and its length; 0 and 0 without one. One token is enough where
    copying would go on."""
    best, rank, last, most = 0, 0, text.size - 1, min(max_ngram, num_ending)
    if 0 < expected <= last:
        best, rank = expected, _length_at(text, expected, ending, most)
    for start in range(1, last + 1, BLOCK):
        if most < min_ngram or (rank == most and start - expected >= abs(best - expected)):
            break
        size = min(BLOCK, last + 1 - start)
        found, row = _match_block(text, start, size, ending, most, differs)
        if found < max(rank, min_ngram):
            continue
        for i in range(size):
            is_longer = found > rank
            if differs[row, i] == 0 and (is_longer or abs(start + i - expected) < abs(best - expected)):
                best, rank = start + i, found
    if rank < min_ngram and best != expected:
        return 0, 0
    return best, _length_at(text, best, ending, num_ending)


_ints = types.int64[::1]


@compiled(
    types.void(
        *(_ints, _ints, _ints, types.int64[:, ::1], types.Array(types.int32, 2, "C", readonly=True), _ints, _ints),
        *(types.int64, types.int64, types.int32[:, ::1], _ints, types.float64[::1]),
    )
)
def history_match(
    texts: Int64Array,
    lengths: Int64Array,
    rows: Int64Array,
    known: Int64Array,
    prefix: Int32Array,
    num_begun: Int64Array,
    max_draft: Int64Array,
    min_ngram: int,
    max_ngram: int,
    token_ids: Int32Array,
    num_draft: Int64Array,
    match_lengths: npt.NDArray[np.float64],
) -> None:
    """See the front door. A draft ends before a token that is negative.

    Args:
        texts, lengths: [R], where the requests' tokens, int32, lie in memory, and how many there are.
        rows: [R], of `known`.
        known: [N, NUM_COLUMNS].
        prefix: [R, K] tokens that follow the texts.
        num_begun: [R], how many; empty: none of any request.
        max_draft: [R], tokens.
        token_ids, num_draft, match_lengths: [R, K], zeros, and [R] each, out.
    """
    ending, differs = np.empty(LONGEST_MATCH, np.int32), np.empty((2, BLOCK), np.int32)
    for index in range(len(rows)):
        num_draft[index], match_lengths[index] = 0, 0.0
        request, size, most = known[rows[index]], lengths[index], min(max_draft[index], token_ids.shape[1])
        if most == 0:
            continue
        own = text_at(texts[index], size)
        end = size + (num_begun[index] if len(num_begun) > 0 else 0)
        num_ending = min(LONGEST_MATCH, end)
        for n in range(num_ending):
            ending[n] = own[end - 1 - n] if end - 1 - n < size else prefix[index, end - 1 - n - size]
        for source in range(2):
            text = own if source == OWN else text_at(request[REFERENCE], request[NUM_TOKENS])
            expected = max(0, end - request[source])
            place, length = _nearest_match(text, ending, num_ending, min_ngram, max_ngram, expected, differs)
            if length > 0 and end == size:
                request[source] = end - place
            if length <= match_lengths[index]:
                continue
            num_draft[index], match_lengths[index], token_ids[index] = 0, length, 0
            for i in range(most if source == OWN else min(most, text.size - place)):
                # The copy from the own text may overlap itself, as in LZ77.
                there = place + i % (end - place) if source == OWN else place + i
                token = text[there] if there < text.size else prefix[index, there - size]
                if token < 0:
                    break
                token_ids[index, i] = token
                num_draft[index] = i + 1
