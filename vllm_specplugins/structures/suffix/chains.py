"""Chains of the places at which the same tokens ended, in many texts: what is compiled of entering and removing them.

For each of LEVELS a table maps the n tokens at and before a place of an owner's texts to the place where they stood
last, and `links` maps that one to the places before it. A place is linked when the token after it exists: each match
goes on. Levels are lazy: places are linked in the next longer one once there are two in a chain, or have been. Nothing
here grows: a token takes at most one slot a level. Places, pages and dimensions: see pages.py.

Table: open addressing, linear probing; a slot, int64, is `hash:32 | place + 1:32`, or 0. Hashes choose where to look,
tokens decide. Links: a place's older and newer neighbour, + 1, 0 where there is none; the newer one is UNLINKED where a
place is in no chain.
"""

from typing import Any

from numba import types

from vllm_specplugins.structures.compiled import borrowed, compiled, inlined
from vllm_specplugins.structures.suffix.pages import (
    FILL,
    FOLLOWING,
    FREE,
    LAST,
    MULTIPLIER,
    NONE,
    NUM_FREE,
    NUM_TOKENS,
    OLDER,
    OWNER,
    PAGE,
    UNORDERED,
    Arrays,
    Int32Array,
    Int64Array,
    arrays_type,
    borrowed_arrays,
    free_last_page,
    match,
    place_before,
    take_page,
    text_type,
)

LEVELS = (1, 2, 4, 8)
LONGEST_LEVEL = LEVELS[-1]
OLD, NEW = 0, 1  # columns of `links`
UNLINKED = -3
SLOTS_A_PAGE = 43  # the table is full to three quarters at most
EVERYTHING = 1 << 40  # as much work as there may be
CLEARING = 3  # the work of clearing a page's slots, in looks into a table


@inlined
def mix(hashed: int, token: int, multiplier: int) -> int:
    """The hash of one token more."""
    hashed = (hashed ^ token) * multiplier
    return hashed ^ (hashed >> 32)


@inlined
def key_of(hashed: int) -> int:
    """What a slot keeps of a hash."""
    return (hashed >> 16) & 0xFFFFFFFF


@inlined
def find(key: int, level: int, text: Int32Array, last: int, owner: int, arrays: Arrays) -> int:
    """Slot of what `text` has up to `last`, or the free one where it belongs."""
    table = arrays.table
    size: int = table.shape[0]
    slot = key * size >> 32
    while table[slot, level] != 0:
        if (table[slot, level] >> 32) & 0xFFFFFFFF == key:
            place = (table[slot, level] & 0xFFFFFFFF) - 1
            n = LEVELS[level]
            if (
                arrays.pages[place // PAGE, OWNER] == owner
                and match(arrays.tokens, arrays.pages, place, text, last, n) == n
            ):
                break
        slot += 1
        if slot == size:
            slot = 0
    return slot


@inlined
def _link(text: Int32Array, last: int, place: int, owner: int, arrays: Arrays) -> int:
    """Makes `place`, where text[last] stands, the latest of its chains; how many looks that took."""
    links, table, multiplier = arrays.links, arrays.table, arrays.state[MULTIPLIER]
    for level in range(len(LEVELS)):
        links[place, level, NEW] = UNLINKED
    hashed, n, looks = mix(0, owner, multiplier), 0, 0
    for level in range(len(LEVELS)):
        if LEVELS[level] > last + 1:
            break
        while n < LEVELS[level]:
            hashed = mix(hashed, text[last - n], multiplier)
            n += 1
        key = key_of(hashed)
        slot = find(key, level, text, last, owner, arrays)
        looks += 1
        older = table[slot, level] & 0xFFFFFFFF
        links[place, level, OLD] = older
        links[place, level, NEW] = 0
        table[slot, level] = key << 32 | (place + 1)
        if older == 0:
            break
        links[older - 1, level, NEW] = place + 1
        if level + 1 < len(LEVELS) and links[older - 1, level + 1, NEW] == UNLINKED:
            _link_alone(older - 1, level + 1, owner, arrays)
    return looks


@inlined
def _link_alone(place: int, level: int, owner: int, arrays: Arrays) -> None:
    """Begins a chain of this level with a place; nothing if there are too few tokens before it."""
    hashed, before, n = mix(0, owner, arrays.state[MULTIPLIER]), place, 0
    while n < LEVELS[level] and before >= 0:
        hashed = mix(hashed, arrays.tokens[before], arrays.state[MULTIPLIER])
        before = place_before(arrays.pages, before)
        n += 1
    if n == LEVELS[level]:
        key, table = key_of(hashed), arrays.table
        size = table.shape[0]
        slot = key * size >> 32
        while table[slot, level] != 0:
            slot += 1
            if slot == size:
                slot = 0
        table[slot, level] = key << 32 | (place + 1)
        arrays.links[place, level, OLD] = arrays.links[place, level, NEW] = 0


@inlined
def _unlink(place: int, level: int, key: int, links: Int32Array, table: Int64Array) -> None:
    """Takes a place out of its chain, and the slot out of the table where that was all of it."""
    older, newer = links[place, level, OLD], links[place, level, NEW]
    if older:
        links[older - 1, level, NEW] = newer
    if newer:
        links[newer - 1, level, OLD] = older
        return
    size = table.shape[0]
    slot = key * size >> 32
    while table[slot, level] & 0xFFFFFFFF != place + 1:
        slot += 1
        if slot == size:
            slot = 0
    table[slot, level] = key << 32 | older if older else 0
    # Slots after a free one move up as far as they may (Knuth, TAOCP 6.4, algorithm R).
    other = slot
    while table[slot, level] == 0:
        other += 1
        if other == size:
            other = 0
        entry = table[other, level]
        if entry == 0:
            break
        home = ((entry >> 32) & 0xFFFFFFFF) * size >> 32
        stays = slot < home <= other if slot < other else slot < home or home <= other
        if not stays:
            table[slot, level] = entry
            table[other, level] = 0
            slot = other


@inlined
def enter(text: Int32Array, start: int, first: int, owner: int, work: int, arrays: Arrays) -> tuple[int, int, int]:
    """Enters text[start:] after what is there of it, as far as work and free pages go.

    Of what is there text[:start] must hold the last LONGEST_LEVEL tokens. Returns where the rest begins, the first page
    of the text, and the work that is left: a token is one, and one for each level in which it is linked.
    """
    pages, state = arrays.pages, arrays.state
    page, last_place = NONE, NONE
    if first != NONE:
        page = pages[first, LAST]
        last_place = page * PAGE + pages[page, FILL] - 1
    while start < text.size and work > 0:
        if page == NONE or pages[page, FILL] == PAGE:
            if state[NUM_FREE] == 0:
                break
            page = take_page(first, owner, pages, state)
            if first == NONE:
                first = page
        place = page * PAGE + pages[page, FILL]
        arrays.tokens[place] = text[start]
        pages[page, FILL] += 1
        work -= 1
        if start > 0:
            work -= _link(text, start - 1, last_place, owner, arrays)
        state[NUM_TOKENS] += 1
        last_place = place
        start += 1
    return start, first, work


@compiled(types.UniTuple(types.int64, 3)(text_type, *[types.int64] * 4, arrays_type))
def enter_text(text: Int32Array, start: int, first: int, owner: int, work: int, arrays: Any) -> tuple[int, int, int]:
    """See `enter`."""
    return enter(borrowed(text), start, first, owner, work, borrowed_arrays(arrays))


@compiled(types.UniTuple(types.int64, 2)(types.int64, types.int64, arrays_type))
def remove_text(first: int, work: int, arrays: Any) -> tuple[int, int]:
    """Removes a text from its end, as far as so much work goes; its first page, or NONE, and the work that is left."""
    tokens, links, table, pages, state = borrowed_arrays(arrays)
    owner, page = pages[first, OWNER], pages[first, LAST]
    while page != NONE and work > 0:
        while pages[page, FILL] > 0 and work > 0:
            pages[page, FILL] -= 1
            state[NUM_TOKENS] -= 1
            work -= 1
            place = before = place_before(pages, page * PAGE + pages[page, FILL])  # what was linked last
            hashed, n = mix(0, owner, state[MULTIPLIER]), 0
            for level in range(len(LEVELS)):
                while n < LEVELS[level] and before >= 0:
                    hashed = mix(hashed, tokens[before], state[MULTIPLIER])
                    before = place_before(pages, before)
                    n += 1
                if n < LEVELS[level] or links[place, level, NEW] == UNLINKED:
                    break
                _unlink(place, level, key_of(hashed), links, table)
                work -= 1
        if pages[page, FILL] == 0:
            page = free_last_page(first, pages, state)
    return (first if page != NONE else NONE), work


@inlined
def clear(start: int, work: int, arrays: Arrays) -> tuple[int, int]:
    """Frees all pages from `start` on, as far as so much work goes; where the rest begins, and the work left."""
    table, pages, state = arrays.table, arrays.pages, arrays.state
    while start < len(pages) and work > 0:
        table[start * SLOTS_A_PAGE : (start + 1) * SLOTS_A_PAGE] = 0
        pages[start, FOLLOWING] = start + 1 if start + 1 < len(pages) else NONE
        pages[start, OLDER] = UNORDERED
        start += 1
        work -= CLEARING
    if start == len(pages):
        state[FREE], state[NUM_FREE], state[NUM_TOKENS] = 0, len(pages), 0
    return start, work


@compiled(types.void(arrays_type))
def clear_all(arrays: Any) -> None:
    """Frees all pages."""
    clear(0, EVERYTHING, borrowed_arrays(arrays))
