"""A step of all requests' suffix lookups, in one compiled call.

The places where the longest match of the newest tokens ends, LONGEST_MATCH at most, vote: a draft takes the token that
most of them have next, that of the latest place among equals; from there on those count that have it. Three texts are
asked, and that draft is taken whose acceptance probabilities have the largest sum: the request's own text and its
reference, which are searched backward, and the ring, whose MOST_PLACES latest places are looked at of the longest
n-gram of LEVELS that is there.

B: requests of a step, R: rows of requests, K: most tokens of a draft, C: cells (see acceptance.py).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from vllm_specplugins.kernels.compiled import borrowed, compiled, inlined, text_at
from vllm_specplugins.structures.suffix.acceptance import Float64Array, cell_of, observe
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
MOST_PLACES = 16
MOST_WORK = 1 << 15  # tokens of matches in a text that are compared
OWN, OTHER, STORE = range(3)


class Asked(NamedTuple):
    """What a step is asked for, of B requests."""

    texts: Int64Array  # [B] where they lie: see views.places_of
    lengths: Int64Array  # [B]
    prefix: Int32Array  # [B, K] what was begun to be drafted
    num_begun: Int64Array  # [B] how many tokens of that, or empty: none
    max_draft: Int64Array  # [B]
    rows: Int64Array  # [B]
    references: Int64Array  # [B * 2] where their references lie, and the lengths of these, or 0
    requests: Int64Array  # [B * 2] how many tokens of a text are new, and the owner of its texts in the ring, or 0
    first_source: int  # of OWN, OTHER and STORE; those before it are not asked
    min_confidence: float  # a draft ends before a token that is less likely to be accepted


class Kept(NamedTuple):
    """What is kept from step to step."""

    accept_probs: Float64Array  # [2, C] see first_accept_probs
    newest: Int32Array  # [R, 2, K + 1] each request's newest draft: their number and the tokens; and their cells


class Drafts(NamedTuple):
    """What comes of a step."""

    token_ids: Int32Array  # [B, K]
    num_draft: Int64Array  # [B]
    match_lengths: Float64Array  # [B]


_ints, _prefix = types.int64[::1], types.Array(types.int32, 2, "C", readonly=True)
asked_type = types.Tuple((_ints, _ints, _prefix, *[_ints] * 5, types.int64, types.float64))
kept_type = types.Tuple((types.float64[:, ::1], types.int32[:, :, ::1]))
drafts_type = types.Tuple((types.int32[:, ::1], types.int64[::1], types.float64[::1]))


@inlined
def find_places(ending: Int32Array, owner: int, places: Int64Array, found: Int64Array, ring: Ring) -> tuple[int, int]:
    """Where the longest match of the owner's texts with `ending` ends, into `places`; how many these are, how long."""
    last, level = ending.size - 1, look_up(ending, ending.size - 1, owner, found, ring) - 1
    while level > 0 and found[2, level] == NONE:
        level -= 1
    longest, num_places, least = 0, 0, LEVELS[level]
    place = found[2, level] if level >= 0 else NONE
    for _ in range(MOST_PLACES):
        if place == NONE:
            break
        length = match(place, ending, last, owner, LONGEST_MATCH, ring)
        if length < least:  # it was overwritten
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
def _search(text: Int32Array, ending: Int32Array, places: Int64Array) -> tuple[int, int]:
    """The same of one text; of its latest places where many match."""
    longest, num_places, work, last = 1, 0, MOST_WORK, ending.size - 1
    for place in range(text.size - 2, -1, -1):
        if text[place] != ending[last]:
            continue
        length, most = 1, min(last, place) + 1
        while length < most and text[place - length] == ending[last - length]:
            length += 1
        if length > longest:
            longest, num_places = length, 0
        if length == longest and num_places < MOST_PLACES:
            places[num_places] = place
            num_places += 1
        work -= length
        if work < 0 or (num_places == MOST_PLACES and longest == LONGEST_MATCH):
            break
    return num_places, longest


@inlined
def _token(place: int, tokens: Int32Array, end: int, drafted: Int32Array) -> int:
    """That of a place; after the end of a text stands its draft."""
    token: int = tokens[place % tokens.size] if place < end else drafted[place - end]
    return token


@inlined
def _vote(
    places: Int64Array, num_places: int, tokens: Int32Array, end: int, drafted: Int32Array, num_copied: int
) -> tuple[int, int, int, int]:
    """Moves the places one on, at most to `end` and as many tokens of the draft: how many go on, the token that most
    have there, how many these are, and the latest."""
    num_next = 0
    for i in range(num_places):
        place = places[i] + 1
        if place < end + num_copied and _token(place, tokens, end, drafted) >= 0:
            places[num_next] = place
            num_next += 1
    best, best_votes, best_token = NONE, 0, 0
    for i in range(num_next):
        if num_next - i <= best_votes:
            break
        token, votes = _token(places[i], tokens, end, drafted), 0
        for j in range(i, num_next):
            votes += token == _token(places[j], tokens, end, drafted)
        if votes > best_votes:
            best, best_votes, best_token = places[i], votes, token
    return num_next, best_token, best_votes, best


@inlined
def _draft(
    places: Int64Array,
    num_places: int,
    longest: int,
    tokens: Int32Array,
    end: int,
    copies: bool,  # after its end the text goes on with the draft, as in LZ77
    is_stored: bool,
    most: int,
    min_confidence: float,
    accept_probs: Float64Array,
    line: Int32Array,
) -> tuple[int, float, int]:
    """What places go on with, into line[0], and its cells, into line[1]: how many tokens, the sum of their acceptance
    probabilities, and a place that the first one is from."""
    confidence, score, first, count = 1.0, 0.0, NONE, 0
    while count < most:
        num_places, token, votes, best = _vote(places, num_places, tokens, end, line[0], count * copies)
        if num_places == 0:
            break
        cell = cell_of(is_stored, longest + count, votes, num_places)
        confidence *= accept_probs[1, cell] / accept_probs[0, cell]
        if confidence < min_confidence:
            break
        first = best if first == NONE else first
        line[0, count], line[1, count] = token, cell
        score += confidence
        count += 1
        num_agreed = 0
        for i in range(num_places):
            if token == _token(places[i], tokens, end, line[0]):
                places[num_agreed] = places[i]
                num_agreed += 1
        num_places = num_agreed
    return count, score, first


@compiled(types.void(asked_type, kept_type, drafts_type, ring_type), nogil=True)
def draft_step(asked: Any, kept: Any, drafts: Any, ring: Any) -> None:
    """Learns from what came, and drafts; what follows a draft that was begun is not remembered.

    Of tuples of Asked, Kept, Drafts, which is written to, and Ring.
    """
    texts, lengths, prefix, num_begun, max_draft, rows, references, requests, first_source, min_confidence = asked
    accept_probs, newest = borrowed(kept[0]), borrowed(kept[1])
    drafts, ring = Drafts(borrowed(drafts[0]), borrowed(drafts[1]), borrowed(drafts[2])), borrowed_ring(ring)
    lines, places = np.empty((2, 2, newest.shape[2]), np.int32), np.empty(MOST_PLACES, np.int64)
    found, last_tokens = np.empty((3, NUM_LEVELS), np.int64), np.empty(LONGEST_MATCH, np.int32)
    for index in range(len(rows)):
        row, num_new, owner, most = rows[index], requests[2 * index], requests[2 * index + 1], max_draft[index]
        text, begun = text_at(texts[index], lengths[index]), num_begun[index] if len(num_begun) else 0
        if num_new:
            observe(newest[row, 0], newest[row, 1], text[text.size - num_new :], accept_probs)
        ending = last_tokens[: min(LONGEST_MATCH, text.size + begun)]
        for i in range(ending.size):
            place = text.size + begun - ending.size + i
            ending[i] = text[place] if place < text.size else prefix[index, place - text.size]
        best, best_count, best_score, match_length = 0, 0, 0.0, 0
        for source in range(first_source if most else STORE + 1, STORE + 1):
            if source == STORE:
                if owner == 0:
                    continue
                num_places, longest = find_places(ending, owner, places, found, ring)
                tokens, end = ring.tokens, ring.state[HEAD]
            else:
                tokens = text if source == OWN else text_at(references[2 * index], references[2 * index + 1])
                num_places, longest = _search(tokens, ending, places)
                end = tokens.size
            copies, line = source == OWN and begun == 0, lines[1 - best]
            count, score, first = _draft(
                places,
                num_places,
                longest,
                tokens,
                end,
                copies,
                source == STORE,
                most,
                min_confidence,
                accept_probs,
                line,
            )
            if score > best_score:
                best, best_count, best_score, match_length = 1 - best, count, score, longest
                if source == STORE:
                    ring.used[first % len(ring.used)] = True
        drafts.num_draft[index], drafts.match_lengths[index] = best_count, match_length
        drafts.token_ids[index, :best_count] = lines[best, 0, :best_count]
        if begun == 0:
            newest[row, 0, 0] = best_count
            newest[row, 0, 1 : best_count + 1] = lines[best, 0, :best_count]
            newest[row, 1, 1 : best_count + 1] = lines[best, 1, :best_count]
