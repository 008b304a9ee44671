"""Drafts from chains of places: the most frequent continuation of the longest match. Compiled.

Of the texts of an owner the MOST_PLACES places are looked at that were entered last among those where the longest
n-gram of LEVELS ends that is there at all; of these count those with the longest match, LONGEST_MATCH at most. A draft
takes the token that most of them have next, that of the latest place among equals; from there on those count that have
it.
"""

from vllm_specplugins.structures.compiled import inlined
from vllm_specplugins.structures.suffix.acceptance import OWN, Float64Array, cell_of
from vllm_specplugins.structures.suffix.chains import LEVELS, NEW, OLD, UNLINKED, find, key_of, mix
from vllm_specplugins.structures.suffix.pages import (
    FIRST,
    MULTIPLIER,
    NONE,
    PAGE,
    Arrays,
    Int32Array,
    Int64Array,
    match,
    place_behind,
)

LONGEST_MATCH = 32
MOST_PLACES = 16


@inlined
def find_places(ending: Int32Array, owner: int, places: Int64Array, arrays: Arrays) -> tuple[int, int]:
    """Where the longest match of the owner's texts with `ending` ends, into `places`; how many these are, how long."""
    links, multiplier, last = arrays.links, arrays.state[MULTIPLIER], ending.size - 1
    hashed, n = mix(0, owner, multiplier), 0
    level, place = -1, 0
    for longer in range(len(LEVELS)):
        if LEVELS[longer] > last + 1:
            break
        while n < LEVELS[longer]:
            hashed = mix(hashed, ending[last - n], multiplier)
            n += 1
        latest = arrays.table[find(key_of(hashed), longer, ending, last, owner, arrays), longer] & 0xFFFFFFFF
        if latest == 0:
            break
        level, place = longer, latest
        is_last = longer + 1 == len(LEVELS) or links[latest - 1, longer + 1, NEW] == UNLINKED
        if links[latest - 1, longer, OLD] == 0 and is_last:
            break
    longest, num_places, most = 0, 0, min(LONGEST_MATCH, last + 1)
    for _ in range(MOST_PLACES):
        if place == 0:
            break
        length = match(arrays.tokens, arrays.pages, place - 1, ending, last, most)
        if length > longest:
            longest, num_places = length, 0
        if length == longest:
            places[num_places] = place - 1
            num_places += 1
        place = links[place - 1, level, OLD]
    return num_places, longest


@inlined
def _token(place: int, line: Int32Array, tokens: Int32Array) -> int:
    """That of a place; one below NONE is in the draft, -2 - its index."""
    token: int = tokens[place] if place >= 0 else line[-2 - place]
    return token


@inlined
def go_on(
    places: Int64Array, num_places: int, copies: bool, line: Int32Array, count: int, arrays: Arrays
) -> tuple[int, int, int, int]:
    """Moves the places one on: how many go on, the token that most have there, how many these are, and the latest.

    Where the text `copies` itself, its end is followed by the draft, as in LZ77.
    """
    num_next = 0
    for i in range(num_places):
        if places[i] < NONE:
            behind = places[i] - 1
        else:
            behind = place_behind(arrays.pages, places[i])
            if behind == NONE and copies and count > 0:
                behind = -2
        if behind != NONE:
            places[num_next] = behind
            num_next += 1
    best, best_votes, best_token = NONE, 0, 0
    for i in range(num_next):
        if num_next - i <= best_votes:
            break
        token, votes = _token(places[i], line, arrays.tokens), 0
        for j in range(i, num_next):
            votes += token == _token(places[j], line, arrays.tokens)
        if votes > best_votes:
            best, best_votes, best_token = places[i], votes, token
    return num_next, best_token, best_votes, best


@inlined
def vote(
    places: Int64Array,
    num_places: int,
    longest: int,
    source: int,
    prefix: int,
    end: int,
    min_confidence: float,
    accept_probs: Float64Array,
    line: Int32Array,
    arrays: Arrays,
) -> tuple[int, float, int]:
    """Continues the draft in line[0], and its cells in line[1], from `prefix` to `end` at most; where it ends, the sum
    of its confidences, and the first page of its text."""
    confidence, score, first, count = 1.0, 0.0, NONE, prefix
    while count < end:
        num_places, token, votes, best = go_on(places, num_places, source == OWN, line[0], count, arrays)
        if num_places == 0:
            break
        cell = cell_of(source, longest + count - prefix, votes, num_places)
        confidence *= accept_probs[1, cell] / accept_probs[0, cell]
        if confidence < min_confidence or token < 0:
            break
        if first == NONE and best >= 0:
            first = arrays.pages[best // PAGE, FIRST]
        line[0, count], line[1, count] = token, cell
        score += confidence
        count += 1
        num_agreed = 0
        for i in range(num_places):
            if token == _token(places[i], line[0], arrays.tokens):
                places[num_agreed] = places[i]
                num_agreed += 1
        num_places = num_agreed
    return count, score, first
