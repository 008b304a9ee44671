"""The order in which texts were used: what is compiled of it."""

from numba import types

from vllm_specplugins.structures.compiled import compiled, inlined
from vllm_specplugins.structures.suffix_pages import (
    NEWER,
    NEWEST,
    NONE,
    NUM_USES,
    OLDER,
    OLDEST,
    OWNER,
    UNORDERED,
    USED,
    Int32Array,
    Int64Array,
)


@inlined
def use(first: int, pages: Int32Array, state: Int64Array) -> None:
    """Makes a text the one that was used last."""
    state[NUM_USES] += 1
    pages[first, USED] = state[NUM_USES]
    if pages[first, OLDER] != UNORDERED:
        if state[NEWEST] == first:
            return
        take_out(first, pages, state)
    newest = state[NEWEST]
    pages[first, OLDER], pages[first, NEWER] = newest, NONE
    if newest != NONE:
        pages[newest, NEWER] = first
    else:
        state[OLDEST] = first
    state[NEWEST] = first


@inlined
def take_out(first: int, pages: Int32Array, state: Int64Array) -> None:
    """Takes a text out of the order of use."""
    older, newer = pages[first, OLDER], pages[first, NEWER]
    if older != NONE:
        pages[older, NEWER] = newer
    else:
        state[OLDEST] = newer
    if newer != NONE:
        pages[newer, OLDER] = older
    else:
        state[NEWEST] = older
    pages[first, OLDER] = UNORDERED


@compiled(types.void(types.int64, types.boolean, types.int32[:, ::1], types.int64[::1]))
def order(first: int, stays: bool, pages: Int32Array, state: Int64Array) -> None:
    """Makes a text the one that was used last, or, unless it stays, takes it out of the order of use."""
    if stays:
        use(first, pages, state)
    else:
        take_out(first, pages, state)


@compiled(types.int64(types.int64, types.int64, types.int32[:, ::1], types.int64[::1]))
def oldest_of(owner: int, furthest: int, pages: Int32Array, state: Int64Array) -> int:
    """The owner's text that was used longest ago, if it is among so many; otherwise that of all owners."""
    oldest: int = state[OLDEST]
    first = oldest
    for _ in range(furthest):
        if first == NONE or pages[first, OWNER] == owner:
            break
        first = pages[first, NEWER]
    return oldest if first == NONE or pages[first, OWNER] != owner else first
