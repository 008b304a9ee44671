"""Drafts from the store for all requests of a step, in one compiled call. A search looks for the places in the ring
where the longest match of the newest tokens ends: the latest MAX_PLACES places of the longest n-gram in LEVELS. The
places vote for the next token. The draft takes the token with the largest number of votes (of equal ones, the latest
place's), and continues with the places that have it. B: requests of a step, K: max_num_draft."""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from vllm_specplugins.kernels.compiled import borrowed, compiled, inlined, text_at
from vllm_specplugins.structures.suffix.ring import (
    HEAD,
    LEVELS,
    NONE,
    NUM_LEVELS,
    Int32Array,
    Int64Array,
    Ring,
    borrowed_ring,
    look_up,
    match,
    ring_type,
)

LONGEST_MATCH = 32
MAX_PLACES = 16
MIN_USED = 4  # shortest match that counts as use of a text


class Asked(NamedTuple):
    texts: Int64Array  # [B] their addresses: see arrays.places_of
    lengths: Int64Array  # [B]
    prefix: Int32Array  # [B, K] tokens of a draft to continue
    num_begun: Int64Array  # [B] number of these tokens; empty: nothing to continue
    limits: Int64Array  # [B]
    to_beat: Int64Array  # [B] a draft needs a match longer than this
    owners: Int64Array  # [B] of the texts, in the ring; 0: none


_ints, _prefix = types.int64[::1], types.Array(types.int32, 2, "C", readonly=True)
asked_type = types.Tuple((_ints, _ints, _prefix, *[_ints] * 4))


@inlined
def find_places(ending: Int32Array, owner: int, places: Int64Array, entries: Int64Array, ring: Ring) -> tuple[int, int]:
    """Writes the places in the owner's texts with the longest match of `ending`, and returns their number and the match
    length."""
    last, level = ending.size - 1, look_up(ending, ending.size - 1, owner, entries, ring) - 1
    while level > 0 and entries[2, level] == NONE:
        level -= 1
    longest, num_places, min_length = 0, 0, LEVELS[level]
    place = entries[2, level] if level >= 0 else NONE
    for _ in range(MAX_PLACES):
        if place == NONE:
            break
        length = match(place, ending, last, owner, LONGEST_MATCH, ring)
        if length < min_length:  # it was overwritten
            break
        if length > longest:
            longest, num_places = length, 0
        if length == longest:
            places[num_places] = place
            num_places += 1
        back = ring.links[place % len(ring.links), level]
        place = place - back if back else NONE
    return num_places, longest


@inlined
def _vote(places: Int64Array, num_places: int, ring: Ring) -> tuple[int, int]:
    """Advances the places by one token, and keeps those whose token has the largest number of votes, the latest first.
    Returns their number and the token."""
    num_next, best_votes, best = 0, 0, NONE
    for i in range(num_places):
        place = places[i] + 1
        if place < ring.state[HEAD] and ring.tokens[place % len(ring.tokens)] >= 0:
            places[num_next] = place
            num_next += 1
    for i in range(num_next):
        if num_next - i <= best_votes:
            break
        token, votes = ring.tokens[places[i] % len(ring.tokens)], 0
        for j in range(i, num_next):
            votes += token == ring.tokens[places[j] % len(ring.tokens)]
        if votes > best_votes:
            best_votes, best = votes, token
    num_agreed = 0
    for i in range(num_next):
        if ring.tokens[places[i] % len(ring.tokens)] == best:
            places[num_agreed] = places[i]
            num_agreed += 1
    return num_agreed, best


@compiled(types.void(asked_type, types.int32[:, ::1], _ints, _ints, ring_type), nogil=True)
def draft_step(asked: Any, token_ids: Int32Array, num_draft: Int64Array, match_lengths: Int64Array, ring: Any) -> None:
    """Drafts one step: takes the fields of Asked and Ring as tuples, and writes drafts [B, K], their lengths [B] and
    the lengths of their matches [B], which must all contain zeros."""
    texts, lengths, prefix, num_begun, limits, to_beat, owners = asked
    token_ids, num_draft, match_lengths = borrowed(token_ids), borrowed(num_draft), borrowed(match_lengths)
    ring = borrowed_ring(ring)
    places, entries = np.empty(MAX_PLACES, np.int64), np.empty((3, NUM_LEVELS), np.int64)
    last_tokens = np.empty(LONGEST_MATCH, np.int32)
    for index in range(len(owners)):
        if owners[index] == 0 or limits[index] == 0:
            continue
        text, begun = text_at(texts[index], lengths[index]), num_begun[index] if len(num_begun) else 0
        ending = last_tokens[: min(LONGEST_MATCH, text.size + begun)]
        for i in range(ending.size):
            place = text.size + begun - ending.size + i
            ending[i] = text[place] if place < text.size else prefix[index, place - text.size]
        num_places, longest = find_places(ending, owners[index], places, entries, ring)
        if longest <= to_beat[index]:
            continue
        for count in range(limits[index]):
            num_places, token = _vote(places, num_places, ring)
            if num_places == 0:
                break
            if count == 0:
                match_lengths[index] = longest
                ring.used[places[0] % len(ring.used)] |= longest >= MIN_USED
            token_ids[index, count] = token
            num_draft[index] = count + 1
