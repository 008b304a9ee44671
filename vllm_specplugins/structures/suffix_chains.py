"""Chains of the places at which the same tokens ended, in many texts: what is compiled of suffix lookup.

A text lies in pages of PAGE tokens and has an owner; a place is the index of a token in all pages. For each of LEVELS a
table maps the n tokens at and before a place of an owner's texts to the place where they stood last, and `links` maps
that one to the places before it. A place is linked when the token behind it exists: each match goes on. Levels are
lazy: places are linked in the next longer one once there are two in a chain, or have been. Nothing here grows: a token
takes at most one slot a level. Dimensions: P pages, L levels, S slots.

Table: open addressing, linear probing; a slot, int64, is `hash:32 | place + 1:32`, or 0. Hashes choose where to look,
tokens decide. Links: a place's older and newer neighbour, + 1, 0 where there is none; the newer one is UNLINKED where a
place is in no chain.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.ngram_table import compiled, inlined

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PAGE = 32
LEVELS = (1, 2, 4, 8)
LONGEST_LEVEL = LEVELS[-1]
NONE, UNORDERED, UNLINKED = -1, -2, -3
# Columns of `pages`. FIRST names a text: its first page. Of a first page: LAST is the text's last one, OLDER and NEWER
# order texts by use, UNORDERED where a text has no place in that order; USED is when that was, in uses of texts.
PREVIOUS, FOLLOWING, FILL, FIRST, OWNER, LAST, OLDER, NEWER, USED = range(9)
# Fields of `state`. FREE is the first of the free pages, which FOLLOWING links.
FREE, NUM_FREE, OLDEST, NEWEST, MULTIPLIER, NUM_TOKENS, NUM_USES = range(7)

text_type = types.Array(types.int32, 1, "C", readonly=True)  # takes those that may be written, too
# `texts`: tokens [P * PAGE] int32, links [L, P * PAGE, 2] int32, table [L, S] int64, pages [P, 9] int32, and state [8]
# int64.
texts_type = types.Tuple(
    (types.int32[::1], types.int32[:, :, ::1], types.int64[:, ::1], types.int32[:, ::1], types.int64[::1])
)


@inlined
def _mix(hashed: int, token: int, multiplier: int) -> int:
    hashed = (hashed ^ token) * multiplier
    return hashed ^ (hashed >> 32)


@inlined
def hash_ending(text: Int32Array, last: int, owner: int, multiplier: int, hashes: Int64Array) -> int:
    """Hashes of the tokens up to `last`, one for each level; how many levels there are tokens for."""
    hashed, n, num_levels = _mix(0, owner, multiplier), 0, 0
    for level in range(len(LEVELS)):
        if LEVELS[level] > last + 1:
            break
        while n < LEVELS[level]:
            hashed = _mix(hashed, text[last - n], multiplier)
            n += 1
        hashes[level] = (hashed >> 16) & 0xFFFFFFFF
        num_levels += 1
    return num_levels


@inlined
def _before(pages: Int32Array, place: int) -> int:
    """The place before this one in its text; below 0 where it begins."""
    if place % PAGE:
        return place - 1
    page: int = pages[place // PAGE, PREVIOUS]
    return page * PAGE + PAGE - 1


@inlined
def place_behind(pages: Int32Array, place: int) -> int:
    """The place behind this one in its text; below 0 where it ends."""
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
        place = _before(pages, place)
        length += 1
    return length


@inlined
def find(
    tokens: Int32Array,
    table: Int64Array,
    pages: Int32Array,
    level: int,
    hashed: int,
    text: Int32Array,
    last: int,
    owner: int,
) -> int:
    """Slot of what `text` has up to `last`, or the free one where it belongs."""
    size: int = table.shape[1]
    slot = hashed * size >> 32
    while table[level, slot] != 0:
        if (table[level, slot] >> 32) & 0xFFFFFFFF == hashed:
            place = (table[level, slot] & 0xFFFFFFFF) - 1
            n = LEVELS[level]
            if pages[place // PAGE, OWNER] == owner and match(tokens, pages, place, text, last, n) == n:
                break
        slot += 1
        if slot == size:
            slot = 0
    return slot


@inlined
def _link(text: Int32Array, last: int, place: int, owner: int, hashes: Int64Array, texts: Any) -> int:
    """Makes `place`, where text[last] stands, the latest of its chains; how many looks that took."""
    tokens, links, table, pages, state = texts
    num_levels = hash_ending(text, last, owner, state[MULTIPLIER], hashes)
    for level in range(len(LEVELS)):
        links[level, place, 1] = UNLINKED
    for level in range(num_levels):
        slot = find(tokens, table, pages, level, hashes[level], text, last, owner)
        older = table[level, slot] & 0xFFFFFFFF
        links[level, place, 0] = older
        links[level, place, 1] = 0
        table[level, slot] = hashes[level] << 32 | (place + 1)
        if older == 0:
            return level + 1
        links[level, older - 1, 1] = place + 1
        if level + 1 < len(LEVELS) and links[level + 1, older - 1, 1] == UNLINKED:
            _link_alone(older - 1, level + 1, owner, texts)
    return num_levels


@inlined
def _link_alone(place: int, level: int, owner: int, texts: Any) -> None:
    """Begins a chain of this level with a place; nothing if there are too few tokens before it."""
    tokens, links, table, pages, state = texts
    hashed, before, n = _mix(0, owner, state[MULTIPLIER]), place, 0
    while n < LEVELS[level] and before >= 0:
        hashed = _mix(hashed, tokens[before], state[MULTIPLIER])
        before = _before(pages, before)
        n += 1
    if n == LEVELS[level]:
        key = (hashed >> 16) & 0xFFFFFFFF
        size = table.shape[1]
        slot = key * size >> 32
        while table[level, slot] != 0:
            slot += 1
            if slot == size:
                slot = 0
        table[level, slot] = key << 32 | (place + 1)
        links[level, place, 0] = links[level, place, 1] = 0


@inlined
def _unlink(links: Any, table: Int64Array, level: int, hashed: int, place: int) -> None:
    """Takes a place out of its chain, and the slot out of the table where that was all of it."""
    older, newer = links[level, place, 0], links[level, place, 1]
    if older:
        links[level, older - 1, 1] = newer
    if newer:
        links[level, newer - 1, 0] = older
        return
    size = table.shape[1]
    slot = hashed * size >> 32
    while table[level, slot] & 0xFFFFFFFF != place + 1:
        slot += 1
        if slot == size:
            slot = 0
    table[level, slot] = hashed << 32 | older if older else 0
    # Slots behind a free one move up as far as they may (Knuth, TAOCP 6.4, algorithm R).
    other = slot
    while table[level, slot] == 0:
        other += 1
        if other == size:
            other = 0
        entry = table[level, other]
        if entry == 0:
            break
        home = ((entry >> 32) & 0xFFFFFFFF) * size >> 32
        stays = slot < home <= other if slot < other else slot < home or home <= other
        if not stays:
            table[level, slot] = entry
            table[level, other] = 0
            slot = other


@inlined
def _take_page(pages: Int32Array, state: Int64Array, first: int, owner: int) -> int:
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
def enter(
    text: Int32Array,
    start: int,
    first: int,
    owner: int,
    work: int,
    hashes: Int64Array,
    texts: Any,
) -> tuple[int, int, int]:
    """Enters text[start:] behind what is there of it, as far as work and free pages go.

    Of what is there text[:start] must hold the last LONGEST_LEVEL tokens. Returns where the rest begins, the first page
    of the text, and the work that is left: a token is one, and one for each level in which it is linked.
    """
    tokens, pages, state = texts[0], texts[3], texts[4]
    page, last_place = NONE, NONE
    if first != NONE:
        page = pages[first, LAST]
        last_place = page * PAGE + pages[page, FILL] - 1
    while start < text.size and work > 0:
        if page == NONE or pages[page, FILL] == PAGE:
            if state[NUM_FREE] == 0:
                break
            page = _take_page(pages, state, first, owner)
            if first == NONE:
                first = page
        place = page * PAGE + pages[page, FILL]
        tokens[place] = text[start]
        pages[page, FILL] += 1
        work -= 1
        if start > 0:
            work -= _link(text, start - 1, last_place, owner, hashes, texts)
        state[NUM_TOKENS] += 1
        last_place = place
        start += 1
    return start, first, work


@compiled(types.UniTuple(types.int64, 3)(text_type, *[types.int64] * 4, texts_type))
def enter_text(
    text: Int32Array,
    start: int,
    first: int,
    owner: int,
    work: int,
    texts: Any,
) -> tuple[int, int, int]:
    """See `enter`."""
    hashes = np.empty(len(LEVELS), np.int64)
    return enter(text, start, first, owner, work, hashes, texts)


@compiled(types.UniTuple(types.int64, 2)(types.int64, types.int64, texts_type))
def remove_text(
    first: int,
    work: int,
    texts: Any,
) -> tuple[int, int]:
    """Removes a text from its end, as far as so much work goes; its first page, or NONE, and the work that is left."""
    tokens, links, table, pages, state = texts
    hashes = np.empty(len(LEVELS), np.int64)
    text = np.empty(LONGEST_LEVEL + PAGE, np.int32)  # the end of the page before, and a page
    owner, page = pages[first, OWNER], pages[first, LAST]
    while page != NONE and work > 0:
        previous = pages[page, PREVIOUS]
        start = 0
        if previous != NONE:
            start = LONGEST_LEVEL
            for i in range(start):
                text[i] = tokens[previous * PAGE + PAGE - start + i]
        fill = pages[page, FILL]
        for i in range(fill):
            text[start + i] = tokens[page * PAGE + i]
        while fill > 0 and work > 0:
            fill -= 1
            place = page * PAGE + fill - 1 if fill else previous * PAGE + PAGE - 1
            work -= 1
            for level in range(hash_ending(text, start + fill - 1, owner, state[MULTIPLIER], hashes)):
                if links[level, place, 1] == UNLINKED:
                    break
                _unlink(links, table, level, hashes[level], place)
                work -= 1
            state[NUM_TOKENS] -= 1
        pages[page, FILL] = fill
        if fill == 0:
            pages[page, FOLLOWING] = state[FREE]
            state[FREE] = page
            state[NUM_FREE] += 1
            page = previous
            if page != NONE:
                pages[page, FOLLOWING] = NONE
                pages[first, LAST] = page
    return (first if page != NONE else NONE), work


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
