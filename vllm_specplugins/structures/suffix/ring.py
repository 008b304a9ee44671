"""The tokens of many owners' texts in a ring, and where their n-grams stood last: what is compiled of it.

A place is a number of the ring's whole history; place p lies at p % N, until place p + N overwrites it. For each of
LEVELS a table maps the n tokens at and before a place to the latest such place, and `links` maps that one to the place
before it. Nothing is ever removed: an entry is of use as long as its place has those tokens, and that owner. Places are
linked whose text goes on. N: places, L: levels, S: slots of a level's table.
"""

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.kernels.compiled import borrowed, compiled, inlined

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

LEVELS = (1, 2, 4, 8)
NUM_LEVELS = len(LEVELS)
WAYS = 8  # slots, of a cache line, that an n-gram may be in
SETS_PER_WAYS = 4, 19  # sets of so many ways, for so many places: a table has 1.7 slots a place
TAG_BITS = 24  # of a slot, `place:40 | tag:24`; 0 is a free one
TAG = (1 << TAG_BITS) - 1
BYTES_PER_TOKEN = 8 + 1 + 4 * NUM_LEVELS + 8 * NUM_LEVELS * WAYS * SETS_PER_WAYS[0] / SETS_PER_WAYS[1]
NONE = -1  # no place; the token between texts
HEAD, MULTIPLIER = 0, 1  # of `state`: how many places there were, a factor of hashes


class Ring(NamedTuple):
    tokens: Int32Array  # [N]
    owners: Int32Array  # [N] of the tokens, above 0
    links: Int32Array  # [N, L] how far before a place those tokens stood, 0: nowhere
    table: Int64Array  # [L, S]
    used: npt.NDArray[np.uint8]  # [N] whether a draft was taken from a place
    state: Int64Array  # [2]


text_type = types.Array(types.int32, 1, "C", readonly=True)  # takes those that may be written, too
# Compiled functions are called with plain tuples: one with names takes 1 us to be looked at.
ring_type = types.Tuple(
    (*[types.int32[::1]] * 2, types.int32[:, ::1], types.int64[:, ::1], types.uint8[::1], types.int64[::1])
)


def new_ring(max_bytes: int) -> Ring:
    """An empty one of so much memory, which is there at once: it does not come page by page while requests wait."""
    num_sets = int(max_bytes / BYTES_PER_TOKEN) * SETS_PER_WAYS[0] // SETS_PER_WAYS[1] // WAYS * WAYS
    num_places = num_sets * SETS_PER_WAYS[1] // SETS_PER_WAYS[0]
    ring = Ring(
        np.empty(num_places, np.int32),
        np.empty(num_places, np.int32),
        np.empty((num_places, NUM_LEVELS), np.int32),
        np.empty((NUM_LEVELS, num_sets * WAYS), np.int64),
        np.empty(num_places, np.uint8),
        np.empty(2, np.int64),
    )
    clear(ring)
    return ring


def clear(ring: Ring) -> None:
    """Forgets all texts."""
    for array in ring:
        array.fill(0)
    ring.state[MULTIPLIER] = secrets.randbits(63) | 1  # secret: nobody can write texts whose hashes collide


@inlined
def borrowed_ring(ring: Any) -> Ring:
    """See borrowed; with names."""
    tokens, owners, links, table, used, state = ring
    return Ring(borrowed(tokens), borrowed(owners), borrowed(links), borrowed(table), borrowed(used), borrowed(state))


@inlined
def match(place: int, text: Int32Array, last: int, owner: int, most: int, ring: Ring) -> int:
    """How many tokens at and before a place are this owner's, and those at and before text[last]; up to `most`."""
    size, n = len(ring.tokens), 0
    most = min(most, last + 1, place + 1 - (ring.state[HEAD] - size))
    at = place % size
    while n < most and ring.tokens[at] == text[last - n] and ring.owners[at] == owner:
        n += 1
        at = at - 1 if at > 0 else size - 1
    return n


@inlined
def look_up(text: Int32Array, last: int, owner: int, found: Int64Array, ring: Ring) -> int:
    """Into `found` [3, L] of each level's n-gram that ends with text[last] its slot, its tag, and the place where it
    stood last; or the slot of the oldest entry, its tag and NONE. Returns how many levels have tokens enough."""
    num_sets = ring.table.shape[1] // WAYS
    hashed, n = owner * ring.state[MULTIPLIER], 0
    for level in range(NUM_LEVELS):
        if LEVELS[level] > last + 1:
            return level
        while n < LEVELS[level]:
            hashed = (hashed ^ text[last - n]) * ring.state[MULTIPLIER]
            hashed ^= hashed >> 32
            n += 1
        tag = hashed & TAG
        first = (((hashed >> TAG_BITS) & 0x7FFFFFFF) * num_sets >> 31) * WAYS
        found[0, level], found[1, level], found[2, level] = first, tag, NONE
        for slot in range(first, first + WAYS):
            entry = ring.table[level, slot]
            if entry & TAG == tag and match(entry >> TAG_BITS, text, last, owner, n, ring) == n:
                found[0, level], found[2, level] = slot, entry >> TAG_BITS
                break
            if entry < ring.table[level, found[0, level]]:
                found[0, level] = slot
    return NUM_LEVELS


@compiled(types.UniTuple(types.int64, 2)(text_type, *[types.int64] * 4, ring_type), nogil=True)
def link(text: Int32Array, start: int, begin: int, owner: int, work: int, ring: Any) -> tuple[int, int]:
    """Goes on to link a text that lies in the ring from place `begin` on, as far as so much work goes, in looks into a
    table. How many of its tokens are linked, `start` of them before, and the work that is left."""
    ring, text, found = borrowed_ring(ring), borrowed(text), np.empty((3, NUM_LEVELS), np.int64)
    while start < text.size - 1 and work > 0:
        place = begin + start
        links = ring.links[place % len(ring.links)]
        links[:] = 0
        num_levels = look_up(text, start, owner, found, ring)
        for level in range(num_levels):
            if found[2, level] != NONE:
                links[level] = place - found[2, level]
            ring.table[level, found[0, level]] = place << TAG_BITS | found[1, level]
        work -= num_levels
        start += 1
    return start, work
