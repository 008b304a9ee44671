"""The suffix lookups of all requests of a step, in one compiled call. A search looks for the places where the longest
match of the newest tokens ends, at most LONGEST_MATCH tokens long. The places vote for the next token: the draft takes
the one with the largest number of votes, among equals that of the latest place, and goes on with the places that have
it. Sources are the request's text and its reference, searched from their ends, and the ring, with the MAX_PLACES latest
places of the longest n-gram of LEVELS. The draft with the largest sum of acceptance probabilities wins. B: requests of
a step, R: rows of requests, K: max_num_draft, C: cells (acceptance.py)."""

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
MAX_PLACES = 16
MAX_WORK = 1 << 15  # tokens of matches in a text that are compared
TEXT, REFERENCE, STORE = range(3)  # sources of a draft


class Asked(NamedTuple):
    texts: Int64Array  # [B] their addresses: see views.places_of
    lengths: Int64Array  # [B]
    prefix: Int32Array  # [B, K] tokens of a draft that was begun
    num_begun: Int64Array  # [B] number of these tokens, or empty: none
    max_draft: Int64Array  # [B]
    rows: Int64Array  # [B]
    references: Int64Array  # [B * 2] address and length of each reference; length 0: none
    requests: Int64Array  # [B * 2] number of new tokens of each text, and its owner in the ring; owner 0: none
    first_source: int  # TEXT, REFERENCE or STORE; earlier sources are not searched
    min_confidence: float  # a draft ends before a token that is less likely to be accepted


class State(NamedTuple):
    accept_probs: Float64Array  # [2, C] see first_accept_probs
    newest: Int32Array  # [R, 2, K + 1] each request's newest draft: its length and tokens; after the length their cells


class Drafts(NamedTuple):
    token_ids: Int32Array  # [B, K]
    num_draft: Int64Array  # [B]
    match_lengths: Float64Array  # [B]


_ints, _prefix = types.int64[::1], types.Array(types.int32, 2, "C", readonly=True)
asked_type = types.Tuple((_ints, _ints, _prefix, *[_ints] * 5, types.int64, types.float64))
state_type = types.Tuple((types.float64[:, ::1], types.int32[:, :, ::1]))
drafts_type = types.Tuple((types.int32[:, ::1], types.int64[::1], types.float64[::1]))


@inlined
def find_places(ending: Int32Array, owner: int, places: Int64Array, entries: Int64Array, ring: Ring) -> tuple[int, int]:
    """Writes the places in the owner's texts where `ending` matches longest; returns their number and that length."""
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
def _search(text: Int32Array, ending: Int32Array, places: Int64Array) -> tuple[int, int]:
    """Does the same for one text, and writes its latest places."""
    longest, num_places, work, last = 1, 0, MAX_WORK, ending.size - 1
    for place in range(text.size - 2, -1, -1):
        if text[place] != ending[last]:
            continue
        length, limit = 1, min(last, place) + 1
        while length < limit and text[place - length] == ending[last - length]:
            length += 1
        if length > longest:
            longest, num_places = length, 0
        if length == longest and num_places < MAX_PLACES:
            places[num_places] = place
            num_places += 1
        work -= length
        if work < 0 or (num_places == MAX_PLACES and longest == LONGEST_MATCH):
            break
    return num_places, longest


@inlined
def _token(place: int, tokens: Int32Array, end: int, draft: Int32Array) -> int:
    """Returns the token at a place of the text, or of its draft after the text's end."""
    token: int = tokens[place % tokens.size] if place < end else draft[place - end]
    return token


@inlined
def _vote(
    places: Int64Array, num_places: int, tokens: Int32Array, end: int, draft: Int32Array, num_copied: int
) -> tuple[int, int, int, int]:
    """Moves the places on by one token, at most to `end` and `num_copied` tokens of the draft. Returns how many go on,
    the token with the largest number of votes, that number, and the latest place that has the token."""
    num_next = 0
    for i in range(num_places):
        place = places[i] + 1
        if place < end + num_copied and _token(place, tokens, end, draft) >= 0:
            places[num_next] = place
            num_next += 1
    best, best_votes, best_token = NONE, 0, 0
    for i in range(num_next):
        if num_next - i <= best_votes:
            break
        token, votes = _token(places[i], tokens, end, draft), 0
        for j in range(i, num_next):
            votes += token == _token(places[j], tokens, end, draft)
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
    copies: bool,  # whether the text goes on with the draft after its end, as in LZ77
    is_stored: bool,
    max_draft: int,
    min_confidence: float,
    accept_probs: Float64Array,
    line: Int32Array,
) -> tuple[int, float, int]:
    """Drafts the tokens after the places into line[0], and their cells into line[1]. Returns their number, the sum of
    their acceptance probabilities, and a place of the first token."""
    confidence, score, first, count = 1.0, 0.0, NONE, 0
    while count < max_draft:
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


@compiled(types.void(asked_type, state_type, drafts_type, ring_type), nogil=True)
def draft_step(asked: Any, state: Any, drafts: Any, ring: Any) -> None:
    """Learns from the new tokens, and drafts. Takes tuples of Asked, State, Drafts, which it writes, and Ring. It does
    not remember a draft that continues a begun one."""
    texts, lengths, prefix, num_begun, max_draft, rows, references, requests, first_source, min_confidence = asked
    accept_probs, newest = borrowed(state[0]), borrowed(state[1])
    drafts, ring = Drafts(borrowed(drafts[0]), borrowed(drafts[1]), borrowed(drafts[2])), borrowed_ring(ring)
    lines, places = np.empty((2, 2, newest.shape[2]), np.int32), np.empty(MAX_PLACES, np.int64)
    entries, last_tokens = np.empty((3, NUM_LEVELS), np.int64), np.empty(LONGEST_MATCH, np.int32)
    for index in range(len(rows)):
        row, num_new, owner, limit = rows[index], requests[2 * index], requests[2 * index + 1], max_draft[index]
        text, begun = text_at(texts[index], lengths[index]), num_begun[index] if len(num_begun) else 0
        if num_new:
            observe(newest[row, 0], newest[row, 1], text[text.size - num_new :], accept_probs)
        ending = last_tokens[: min(LONGEST_MATCH, text.size + begun)]
        for i in range(ending.size):
            place = text.size + begun - ending.size + i
            ending[i] = text[place] if place < text.size else prefix[index, place - text.size]
        best, best_count, best_score, match_length = 0, 0, 0.0, 0
        for source in range(first_source if limit else STORE + 1, STORE + 1):
            if source == STORE:
                if owner == 0:
                    continue
                num_places, longest = find_places(ending, owner, places, entries, ring)
                tokens, end = ring.tokens, ring.state[HEAD]
            else:
                tokens = text if source == TEXT else text_at(references[2 * index], references[2 * index + 1])
                num_places, longest = _search(tokens, ending, places)
                end = tokens.size
            copies, is_stored, line = source == TEXT and begun == 0, source == STORE, lines[1 - best]
            count, score, first = _draft(
                places, num_places, longest, tokens, end, copies, is_stored, limit, min_confidence, accept_probs, line
            )
            if score > best_score:
                best, best_count, best_score, match_length = 1 - best, count, score, longest
                if is_stored:
                    ring.used[first % len(ring.used)] = True
        drafts.num_draft[index], drafts.match_lengths[index] = best_count, match_length
        drafts.token_ids[index, :best_count] = lines[best, 0, :best_count]
        if begun == 0:
            newest[row, 0, 0] = best_count
            newest[row, :, 1 : best_count + 1] = lines[best, :, :best_count]
