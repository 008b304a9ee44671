"""Drafts from chains of places: the most frequent continuation of the longest match. Compiled.

Of the texts of an owner the MOST_PLACES places are looked at that were entered last among those where the longest
n-gram of LEVELS ends that is there at all; of these count those with the longest match, LONGEST_MATCH at most. A draft
takes the token that most of them have next, that of the latest place among equals; from there on those count that have
it. The chance of a token is learned by `cell`: by source, length of the match and share of the places.
Dimensions: B requests, K draft tokens, C cells.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.ngram_table import compiled, inlined
from vllm_specplugins.structures.suffix_chains import (
    FIRST,
    LEVELS,
    MULTIPLIER,
    NEWER,
    NEWEST,
    NONE,
    NUM_USES,
    OLDER,
    OLDEST,
    PAGE,
    UNLINKED,
    UNORDERED,
    USED,
    Int32Array,
    Int64Array,
    enter,
    find,
    hash_ending,
    match,
    place_behind,
    texts_type,
)

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

MAX_DRAFT = 64
LONGEST_MATCH = 32
MOST_PLACES = 16
OWN, STORE = 0, 1  # sources
NUM_GRADES, NUM_SHARES = 7, 5
NUM_CELLS = 2 * NUM_GRADES * NUM_SHARES
MEMORY = 1024.0  # how many tokens of a cell are remembered
FIRST_WEIGHT = 8.0  # tokens that the first guess of a chance counts as
FIRST_CHANCES = (0.3, 0.5, 0.6, 0.75, 0.85, 0.92, 0.96)  # by grade, where all places agree
# Columns of `requests`, [R, 6] int64: the number of the request's own text and its first page, how many tokens of it
# are entered, whether these are all; numbers of the other owners that it has, or 0.
OWNER, FIRST_PAGE, NUM_ENTERED, IS_WHOLE, REFERENCE, TENANT = range(6)
NUM_COLUMNS = 6
OWNERS = (OWNER, REFERENCE, TENANT)


def first_chances() -> Float64Array:
    """[2, C] float64: tokens tried and accepted of each cell, before there was any."""
    tried = np.full((2, NUM_GRADES, NUM_SHARES), FIRST_WEIGHT)
    shares = np.array([0.9, 0.35, 0.65, 0.85, 1.0])
    accepted = tried * np.array(FIRST_CHANCES)[None, :, None] * shares
    return np.stack([tried.ravel(), accepted.ravel()])


@inlined
def _cell(source: int, length: int, votes: int, num_places: int) -> int:
    """Of a token behind a match of this length, or one that grew to it. 0: one place, 4: several that all agree."""
    grade = (length > 1) + (length > 2) + (length > 3) + (length > 5) + (length > 8) + (length > 16)
    share = 0
    if num_places > 1:
        share = 1 + (2 * votes > num_places) + (4 * votes > 3 * num_places) + (votes == num_places)
    return (source * NUM_GRADES + grade) * NUM_SHARES + share


@inlined
def _find_places(
    ending: Int32Array,
    owner: int,
    hashes: Int64Array,
    places: Int64Array,
    texts: Any,
) -> tuple[int, int]:
    """Where the longest match of the owner's texts with `ending` ends, into `places`; how many these are, how long."""
    tokens, links, table, pages, state = texts
    last = ending.size - 1
    num_levels = hash_ending(ending, last, owner, state[MULTIPLIER], hashes)
    level, place, longest, num_places = -1, 0, 0, 0
    for longer in range(num_levels):
        slot = find(tokens, table, pages, longer, hashes[longer], ending, last, owner)
        latest = table[longer, slot] & 0xFFFFFFFF
        if latest == 0:
            break
        level, place = longer, latest
        if links[longer, latest - 1, 0] == 0 and (
            longer + 1 == len(LEVELS) or links[longer + 1, latest - 1, 1] == UNLINKED
        ):
            break
    most = min(LONGEST_MATCH, last + 1)
    for _ in range(MOST_PLACES):
        if place == 0:
            break
        length = match(tokens, pages, place - 1, ending, last, most)
        if length > longest:
            longest, num_places = length, 0
        if length == longest:
            places[num_places] = place - 1
            num_places += 1
        place = links[level, place - 1, 0]
    return num_places, longest


@inlined
def _vote(
    places: Int64Array,
    num_places: int,
    longest: int,
    source: int,
    copies: bool,
    begun: int,
    end: int,
    min_confidence: float,
    chances: Float64Array,
    line: Int32Array,
    cells: Int32Array,
    texts: Any,
) -> tuple[int, float, int]:
    """Continues the draft in `line` from `begun` to `end` at most; where it ends, the sum of its confidences, its text.

    A place below NONE is one in the draft, -2 - its index: where the text `copies` itself, its end is followed by the
    draft, as in LZ77.
    """
    tokens, pages = texts[0], texts[3]
    confidence, score, first = 1.0, 0.0, NONE
    count = begun
    while count < end:
        num_next = 0
        for i in range(num_places):
            if places[i] < NONE:
                behind = places[i] - 1
            else:
                behind = place_behind(pages, places[i])
                if behind == NONE and copies and count > 0:
                    behind = -2
            if behind != NONE:
                places[num_next] = behind
                num_next += 1
        if num_next == 0:
            break
        best, best_votes, best_token = 0, 0, 0
        for i in range(num_next):
            token = tokens[places[i]] if places[i] >= 0 else line[-2 - places[i]]
            votes = 0
            for j in range(i, num_next):
                votes += token == (tokens[places[j]] if places[j] >= 0 else line[-2 - places[j]])
            if votes > best_votes:
                best, best_votes, best_token = i, votes, token
        cell = _cell(source, longest + count - begun, best_votes, num_next)
        confidence *= chances[1, cell] / chances[0, cell]
        if confidence < min_confidence or best_token < 0:
            break
        if first == NONE and places[best] >= 0:
            first = pages[places[best] // PAGE, FIRST]
        line[count], cells[count] = best_token, cell
        score += confidence
        count += 1
        num_places = 0
        for i in range(num_next):
            if best_token == (tokens[places[i]] if places[i] >= 0 else line[-2 - places[i]]):
                places[num_places] = places[i]
                num_places += 1
    return count, score, first


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


@inlined
def _learn(drafted: Int32Array, cells: Int32Array, said: Int32Array, chances: Float64Array) -> None:
    """Counts which tokens of a draft, of which there are drafted[0], were those that came."""
    for i in range(min(drafted[0], said.size)):
        cell = cells[i + 1]
        if chances[0, cell] > MEMORY:
            chances[0, cell] *= 0.5
            chances[1, cell] *= 0.5
        chances[0, cell] += 1
        if drafted[i + 1] != said[i]:
            break
        chances[1, cell] += 1


@compiled(
    types.Tuple((types.int64, types.float64, types.int64, types.int64))(
        *(types.int32[::1], types.int64, types.int64, types.boolean, types.int64, types.int64, types.float64),
        *(types.float64[:, ::1], types.int32[:, ::1], texts_type),
    )
)
def _search(
    ending: Int32Array,
    owner: int,
    source: int,
    copies: bool,
    begun: int,
    end: int,
    min_confidence: float,
    chances: Float64Array,
    line: Int32Array,
    texts: Any,
) -> tuple[int, float, int, int]:
    """The draft from an owner's texts, into `line`: its end, the sum of its confidences, the length of the match, and
    the first page of the text."""
    hashes = np.empty(len(LEVELS), np.int64)
    places = np.empty(MOST_PLACES, np.int64)
    num_places, longest = _find_places(ending, owner, hashes, places, texts)
    count, score, first = _vote(
        places,
        num_places,
        longest,
        source,
        copies,
        begun,
        end,
        min_confidence,
        chances,
        line[0],
        line[1],
        texts,
    )
    return count, score, longest, first


steps = (types.int32[::1], types.int64[::1], types.Array(types.int32, 1, "C", readonly=True), types.int64)
kept = (types.float64, types.float64[:, ::1], types.int64[:, ::1], types.int32[:, :, ::1])
results = (types.int32[:, ::1], types.int32[::1], types.float32[::1])


@compiled(types.int64(*steps, *kept, *results, texts_type, texts_type))
def draft_step(
    flat: Int32Array,
    rows: Int64Array,
    wanted: Int32Array,
    num_begun: int,
    min_confidence: float,
    chances: Float64Array,
    requests: Int64Array,
    newest: Int32Array,
    out: Int32Array,
    num_draft: Int32Array,
    match_lengths: Float32Array,
    own: Any,
    store: Any,
) -> int:
    """Enters what is new of requests' own texts, and drafts from there, from references and from tenants' stores: the
    draft with the largest sum of confidences.

    Args:
        flat: the ends of their texts, one behind the other, each with what was begun to be drafted.
        rows: [B * 4], of each request its row in `requests`, the length of its piece of `flat`, how many tokens of that
            are new, and the length of its text.
        wanted: [B] how many tokens to draft.
        num_begun: tokens that were begun, of all.
        min_confidence: a draft ends before a token that is less sure.
        chances: [2, C], see first_chances.
        requests: [R, 6], see above.
        newest: [R, 2, K + 1], each request's newest draft, in and out: their number and the tokens; and their cells.
        out: [B, K] tokens.
        num_draft: [B] how many.
        match_lengths: [B] of the match that was taken.

    Returns how many own texts are not whole now, for want of pages.
    """
    hashes = np.empty(len(LEVELS), np.int64)
    lines = np.empty((2, 2, 2 * MAX_DRAFT), np.int32)  # tokens and cells, of the best draft and of another
    end, num_cut_off = 0, 0
    for row in range(wanted.size):
        request, size, num_new, num_tokens = rows[4 * row], rows[4 * row + 1], rows[4 * row + 2], rows[4 * row + 3]
        ending = flat[end : end + size]
        end += size
        history = ending[: size - num_begun]
        drafted, cells = newest[request, 0], newest[request, 1]
        if num_new:
            _learn(drafted, cells, history[history.size - num_new :], chances)
        left = num_tokens - requests[request, NUM_ENTERED]
        if left and requests[request, IS_WHOLE]:
            next_one, first, _ = enter(
                history,
                history.size - left,
                requests[request, FIRST_PAGE],
                requests[request, OWNER],
                1 << 40,
                hashes,
                own,
            )
            requests[request, FIRST_PAGE] = first
            left = history.size - next_one
            requests[request, NUM_ENTERED] = num_tokens - left
            requests[request, IS_WHOLE] = left == 0
            num_cut_off += left > 0
        most = num_begun + wanted[row]
        best, best_count, best_score, match_lengths[row] = 0, num_begun, 0.0, 0
        for i in range(num_begun):
            lines[0, 0, i] = lines[1, 0, i] = ending[history.size + i]
        for source in range(3):
            other = 1 - best
            line = lines[other]
            owner = requests[request, OWNERS[source]]
            if owner == 0 or most == num_begun or (source == 0 and requests[request, IS_WHOLE] == 0):
                continue
            if source < 2:
                count, score, longest, first = _search(
                    ending, owner, OWN, source == 0, num_begun, most, min_confidence, chances, line, own
                )
            else:
                count, score, longest, first = _search(
                    ending, owner, STORE, False, num_begun, most, min_confidence, chances, line, store
                )
            if score > best_score:
                best, best_count, best_score, match_lengths[row] = other, count, score, longest
                if source == 2 and store[3][first, OLDER] != UNORDERED:
                    use(first, store[3], store[4])
        count = best_count - num_begun
        num_draft[row] = count
        drafted[0] = count if num_begun == 0 else 0  # what comes next is not what the other draft is for
        for i in range(count):
            out[row, i] = drafted[i + 1] = lines[best, 0, num_begun + i]
            cells[i + 1] = lines[best, 1, num_begun + i]
    return num_cut_off
