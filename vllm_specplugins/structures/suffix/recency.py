"""The order in which texts were used, of each kind: what is compiled of it."""

from numba import types

from vllm_specplugins.structures.compiled import compiled, inlined
from vllm_specplugins.structures.suffix.pages import (
    KIND,
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
def use(first: int, kind: int, pages: Int32Array, state: Int64Array) -> None:
    """Makes a text the one of this kind that was used last."""
    state[NUM_USES] += 1
    pages[first, USED] = state[NUM_USES]
    if pages[first, OLDER] != UNORDERED:
        take_out(first, pages, state)
    newest = state[NEWEST + kind]
    pages[first, KIND], pages[first, OLDER], pages[first, NEWER] = kind, newest, NONE
    if newest != NONE:
        pages[newest, NEWER] = first
    else:
        state[OLDEST + kind] = first
    state[NEWEST + kind] = first


@inlined
def take_out(first: int, pages: Int32Array, state: Int64Array) -> None:
    """Takes a text out of the order of use."""
    kind, older, newer = pages[first, KIND], pages[first, OLDER], pages[first, NEWER]
    if older != NONE:
        pages[older, NEWER] = newer
    else:
        state[OLDEST + kind] = newer
    if newer != NONE:
        pages[newer, OLDER] = older
    else:
        state[NEWEST + kind] = older
    pages[first, OLDER] = UNORDERED


@compiled(types.void(types.int64, types.int64, types.int32[:, ::1], types.int64[::1]))
def order(first: int, kind: int, pages: Int32Array, state: Int64Array) -> None:
    """Makes a text the one of this kind that was used last, or, where there is NONE, takes it out of the order."""
    if kind == NONE:
        take_out(first, pages, state)
    else:
        use(first, kind, pages, state)


@compiled(types.int64(types.int64, types.int64, types.int64, types.int32[:, ::1], types.int64[::1]))
def oldest_of(owner: int, kind: int, furthest: int, pages: Int32Array, state: Int64Array) -> int:
    """The owner's text of this kind that was used longest ago, if it is among so many; otherwise NONE."""
    first: int = state[OLDEST + kind]
    for _ in range(furthest):
        if first == NONE or pages[first, OWNER] == owner:
            return first
        first = pages[first, NEWER]
    return NONE
