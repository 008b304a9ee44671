"""Prompt lookup for a batch on the host, compiled. While a copy continues, it reads no text. Otherwise it searches
texts block by block: each pass over a block compares one more token of the ending, while any place matches. This bounds
the work for any text, and passes are vectorised. R: rows, K: max_num_draft, N: requests."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ..compiled import compiled, inlined, text_at
from . import LONGEST_MATCH

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

BLOCK = 1024  # places
# Columns of `known`: the two of Texts.distances, the address of a request's reference, and its number of tokens, or 0.
TEXT, OTHER, REFERENCE, NUM_TOKENS = range(NUM_COLUMNS := 4)


@inlined
def _length_at(text: Int32Array, place: int, ending: Int32Array, num_ending: int) -> int:
    n, limit = 0, min(num_ending, place)
    while n < limit and text[place - 1 - n] == ending[n]:
        n += 1
    return n


@inlined
def _first_pass(tokens: Int32Array, token: int, differs: Int32Array) -> bool:
    """Returns whether any token is this one, and writes 0 to `differs` there."""
    matches = False
    for i in range(tokens.size):
        differs[i] = tokens[i] ^ token
        if differs[i] == 0:
            matches = True
    return matches


@inlined
def _pass(tokens: Int32Array, token: int, before: Int32Array, differs: Int32Array) -> bool:
    """Does the same among places that matched before."""
    matches = False
    for i in range(tokens.size):
        difference = before[i] | (tokens[i] ^ token)
        differs[i] = difference
        if difference == 0:
            matches = True
    return matches


@inlined
def _match_block(text: Int32Array, start: int, size: int, ending: Int32Array, limit: int, differs: Int32Array) -> Any:
    """Returns a block's longest match before a place, at most `limit`, and the row of `differs` that is 0 there."""
    newest = 0
    if not _first_pass(text[start - 1 : start - 1 + size], ending[0], differs[0]):
        return 0, 0
    for n in range(1, limit):
        other, first = 1 - newest, max(0, n + 1 - start)  # earlier places have fewer tokens before them
        differs[other, :first] = 1
        tokens = text[start - 1 - n + first : start - 1 - n + size]
        if not _pass(tokens, ending[n], differs[newest, first:size], differs[other, first:size]):
            return n, newest
        newest = other
    return limit, newest


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
    """Returns the place after the longest match, and its length; 0 and 0 without one."""
    best, rank, last, limit = 0, 0, text.size - 1, min(max_ngram, num_ending)
    if 0 < expected <= last:
        best, rank = expected, _length_at(text, expected, ending, limit)
    for start in range(1, last + 1, BLOCK):
        if limit < min_ngram or (rank == limit and start - expected >= abs(best - expected)):
            break
        size = min(BLOCK, last + 1 - start)
        length, row = _match_block(text, start, size, ending, limit, differs)
        if length < max(rank, min_ngram):
            continue
        for i in range(size):
            is_longer = length > rank
            if differs[row, i] == 0 and (is_longer or abs(start + i - expected) < abs(best - expected)):
                best, rank = start + i, length
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
    limits: Int64Array,
    min_ngram: int,
    max_ngram: int,
    token_ids: Int32Array,
    num_draft: Int64Array,
    match_lengths: npt.NDArray[np.float64],
) -> None:
    """Drafts as the package's `history_match` does. A draft ends before a negative token.

    Args:
        texts, lengths, limits: [R] each; the texts are addresses of int32 tokens.
        rows: [R], the requests' rows in `known` [N, NUM_COLUMNS], which is updated.
        prefix, num_begun: [R, K] tokens of a draft to continue and [R] their number; empty: none.
        token_ids, num_draft, match_lengths: [R, K] zeros, [R] and [R], written.
    """
    ending, differs = np.empty(LONGEST_MATCH, np.int32), np.empty((2, BLOCK), np.int32)
    for index in range(len(rows)):
        num_draft[index], match_lengths[index] = 0, 0.0
        request, size, limit = known[rows[index]], lengths[index], min(limits[index], token_ids.shape[1])
        if limit == 0:
            continue
        whole = text_at(texts[index], size)
        end = size + (num_begun[index] if len(num_begun) > 0 else 0)
        num_ending = min(LONGEST_MATCH, end)
        for n in range(num_ending):
            ending[n] = whole[end - 1 - n] if end - 1 - n < size else prefix[index, end - 1 - n - size]
        for source in range(2):
            text = whole if source == TEXT else text_at(request[REFERENCE], request[NUM_TOKENS])
            expected = max(0, end - request[source])
            place, length = _nearest_match(text, ending, num_ending, min_ngram, max_ngram, expected, differs)
            if length > 0 and end == size:
                request[source] = end - place
            if length <= match_lengths[index]:
                continue
            num_draft[index], match_lengths[index], token_ids[index] = 0, length, 0
            for i in range(limit if source == TEXT else min(limit, text.size - place)):
                # A copy from the text may overlap itself, as in LZ77.
                there = place + i % (end - place) if source == TEXT else place + i
                token = text[there] if there < text.size else prefix[index, there - size]
                if token < 0:
                    break
                token_ids[index, i] = token
                num_draft[index] = i + 1
