"""Contains the compiled code of the store: a ring with the tokens of many owners' texts, and the latest places of their
n-grams. Places are numbered over the ring's whole history: place p is stored at p % N, until place p + N overwrites it.
For each n in LEVELS a table maps the n tokens up to a place to the latest such place, and `links` maps that place to
the previous one. Entries are never removed, so a look-up compares the tokens and the owner at the place. The last place
of a text has no link. N: places, L: levels, S: slots of a level's table."""

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
WAYS = 8  # slots in the set of an n-gram, which fills a cache line
SETS_PER_WAYS = 4, 19  # 4 sets for 19 places: a table has 1.7 slots a place
TAG_BITS = 24  # a slot is `place:40 | tag:24`; 0 is free
TAG = (1 << TAG_BITS) - 1
BYTES_PER_TOKEN = 8 + 1 + 4 * NUM_LEVELS + 8 * NUM_LEVELS * WAYS * SETS_PER_WAYS[0] / SETS_PER_WAYS[1]
NONE = -1  # no place; the token between texts
HEAD, MULTIPLIER = 0, 1  # of `state`: number of places so far, a factor of hashes


class Ring(NamedTuple):
    tokens: Int32Array  # [N]
    owners: Int32Array  # [N] of the tokens, above 0
    links: Int32Array  # [N, L] distance to the earlier place of the same n-gram, 0: none
    table: Int64Array  # [L, S]
    used: npt.NDArray[np.uint8]  # [N] whether a draft was taken from a place
    state: Int64Array  # [2]


text_type = types.Array(types.int32, 1, "C", readonly=True)  # also accepts writable arrays
# Compiled functions take plain tuples: numba needs 1 us to inspect a named one.
ring_type = types.Tuple(
    (*[types.int32[::1]] * 2, types.int32[:, ::1], types.int64[:, ::1], types.uint8[::1], types.int64[::1])
)


def new_ring(max_bytes: int) -> Ring:
    """Returns an empty ring, and writes to all of its memory, so no request waits for new pages."""
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
    for array in ring:
        array.fill(0)
    ring.state[MULTIPLIER] = secrets.randbits(63) | 1  # secret, so no client can choose texts with colliding hashes


@inlined
def borrowed_ring(ring: Any) -> Ring:
    tokens, owners, links, table, used, state = ring
    return Ring(borrowed(tokens), borrowed(owners), borrowed(links), borrowed(table), borrowed(used), borrowed(state))


@inlined
def match(place: int, text: Int32Array, last: int, owner: int, limit: int, ring: Ring) -> int:
    """Counts, up to `limit`, the tokens at and before a place that belong to the owner and match those up to
    text[last]."""
    size, n = len(ring.tokens), 0
    limit = min(limit, last + 1, place + 1 - (ring.state[HEAD] - size))
    at = place % size
    while n < limit and ring.tokens[at] == text[last - n] and ring.owners[at] == owner:
        n += 1
        at = at - 1 if at > 0 else size - 1
    return n


@inlined
def look_up(text: Int32Array, last: int, owner: int, entries: Int64Array, ring: Ring) -> int:
    """Writes slot, tag and latest place of each level's n-gram that ends with text[last] to `entries` [3, L]; for a new
    n-gram, the slot of its set's oldest entry and NONE. Returns the number of levels with enough tokens."""
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
        entries[0, level], entries[1, level], entries[2, level] = first, tag, NONE
        for slot in range(first, first + WAYS):
            entry = ring.table[level, slot]
            if entry & TAG == tag and match(entry >> TAG_BITS, text, last, owner, n, ring) == n:
                entries[0, level], entries[2, level] = slot, entry >> TAG_BITS
                break
            if entry < ring.table[level, entries[0, level]]:
                entries[0, level] = slot
    return NUM_LEVELS


@compiled(types.UniTuple(types.int64, 2)(text_type, *[types.int64] * 4, ring_type), nogil=True)
def link(text: Int32Array, start: int, begin: int, owner: int, work: int, ring: Any) -> tuple[int, int]:
    """Links the text at place `begin` from its token `start` on, with at most `work` table look-ups. Returns the number
    of linked tokens and the rest of the work."""
    ring, text, entries = borrowed_ring(ring), borrowed(text), np.empty((3, NUM_LEVELS), np.int64)
    while start < text.size - 1 and work > 0:
        place = begin + start
        links = ring.links[place % len(ring.links)]
        links[:] = 0
        num_levels = look_up(text, start, owner, entries, ring)
        for level in range(num_levels):
            if entries[2, level] != NONE:
                links[level] = place - entries[2, level]
            ring.table[level, entries[0, level]] = place << TAG_BITS | entries[1, level]
        work -= num_levels
        start += 1
    return start, work
