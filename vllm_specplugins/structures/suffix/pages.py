"""Texts in pages: what is compiled of where tokens lie.

A text lies in pages of PAGE tokens and has an owner; a place is the index of a token in all pages. Dimensions: P pages,
L levels, S slots of a table (see chains.py).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.compiled import borrowed, compiled, inlined

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PAGE = 32
NONE, UNORDERED = -1, -2
# Columns of `pages`. FIRST names a text: its first page. Of a first page: LAST is the text's last one, OLDER and NEWER
# order texts by use, UNORDERED where a text has no place in that order; USED is when that was, in uses of texts; KIND,
# UNPROVEN or PROVEN (see store.py), each with an order of its own.
PREVIOUS, FOLLOWING, FILL, FIRST, OWNER, LAST, OLDER, NEWER, USED, KIND = range(10)
NUM_PAGE_COLUMNS = 10
UNPROVEN, PROVEN = 0, 1
# Fields of `state`. FREE is the first of the free pages, which FOLLOWING links; OLDEST + KIND and NEWEST + KIND.
FREE, NUM_FREE, OLDEST, _, NEWEST, _, MULTIPLIER, NUM_TOKENS, NUM_USES = range(9)
NUM_FIELDS = 9


class Arrays(NamedTuple):
    """Texts, or those of a piece of the memory, where places, pages and slots are counted from its beginning."""

    tokens: Int32Array  # [P * PAGE]
    links: Int32Array  # [P * PAGE, L, 2]
    table: Int64Array  # [S, L]
    pages: Int32Array  # [P, 10]
    state: Int64Array  # [9]


text_type = types.Array(types.int32, 1, "C", readonly=True)  # takes those that may be written, too
# Compiled functions are called with plain tuples: one with names takes 1 us to be looked at.
arrays_type = types.Tuple(
    (types.int32[::1], types.int32[:, :, ::1], types.int64[:, ::1], types.int32[:, ::1], types.int64[::1])
)


@inlined
def borrowed_arrays(arrays: Any) -> Arrays:
    """See borrowed; with names."""
    tokens, links, table, pages, state = arrays
    return Arrays(borrowed(tokens), borrowed(links), borrowed(table), borrowed(pages), borrowed(state))


@inlined
def place_before(pages: Int32Array, place: int) -> int:
    """The place before this one in its text; below 0 where it begins."""
    if place % PAGE:
        return place - 1
    page: int = pages[place // PAGE, PREVIOUS]
    return page * PAGE + PAGE - 1


@inlined
def place_behind(pages: Int32Array, place: int) -> int:
    """The place after this one in its text; below 0 where it ends."""
    page = place // PAGE
    if place % PAGE + 1 < pages[page, FILL]:
        return place + 1
    if place % PAGE + 1 < PAGE:
        return NONE
    page = pages[page, FOLLOWING]
    return page * PAGE if page != NONE and pages[page, FILL] > 0 else NONE


@inlined
def match(tokens: Int32Array, pages: Int32Array, place: int, text: Int32Array, last: int, most: int) -> int:
    """How many tokens at and before `place` are those at and before `last`, up to `most`."""
    length = 0
    while length < most and place >= 0 and tokens[place] == text[last - length]:
        place = place_before(pages, place)
        length += 1
    return length


@inlined
def take_page(first: int, owner: int, pages: Int32Array, state: Int64Array) -> int:
    """Another page for the text that begins in page `first`; NONE: for a new text."""
    page: int = state[FREE]
    state[FREE] = pages[page, FOLLOWING]
    state[NUM_FREE] -= 1
    if first == NONE:
        first = page
        pages[page, PREVIOUS] = NONE
        pages[page, OLDER] = UNORDERED
    else:
        last = pages[first, LAST]
        pages[page, PREVIOUS] = last
        pages[last, FOLLOWING] = page
    pages[first, LAST] = page
    pages[page, FOLLOWING] = NONE
    pages[page, FILL] = 0
    pages[page, FIRST] = first
    pages[page, OWNER] = owner
    return page


@inlined
def free_last_page(first: int, pages: Int32Array, state: Int64Array) -> int:
    """Frees the last page of a text; the one that is its last then, or NONE."""
    page = pages[first, LAST]
    previous: int = pages[page, PREVIOUS]
    pages[page, FOLLOWING] = state[FREE]
    state[FREE] = page
    state[NUM_FREE] += 1
    if previous != NONE:
        pages[previous, FOLLOWING] = NONE
        pages[first, LAST] = previous
    return previous


@compiled(types.int64(types.int64, types.int32[::1], types.int32[::1], types.int32[:, ::1]))
def read_text(first: int, out: Int32Array, tokens: Int32Array, pages: Int32Array) -> int:
    """Copies the text that begins in page `first`, as far as `out` goes; its whole length."""
    length, page = 0, first
    while page != NONE:
        for i in range(pages[page, FILL]):
            if length < out.size:
                out[length] = tokens[page * PAGE + i]
            length += 1
        page = pages[page, FOLLOWING]
    return length
