"""A step of all requests' suffix lookups, in one compiled call.

Dimensions: B requests of a step, R rows of requests, K draft tokens, C cells (see acceptance.py).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.compiled import borrowed, compiled, inlined
from vllm_specplugins.structures.suffix.acceptance import OWN, STORE, Float64Array, learn
from vllm_specplugins.structures.suffix.chains import EVERYTHING, SLOTS_A_PAGE, clear, enter
from vllm_specplugins.structures.suffix.pages import (
    NONE,
    NUM_FIELDS,
    OLDER,
    PAGE,
    PROVEN,
    UNORDERED,
    Arrays,
    Int32Array,
    Int64Array,
    arrays_type,
    borrowed_arrays,
    text_type,
)
from vllm_specplugins.structures.suffix.recency import use
from vllm_specplugins.structures.suffix.search import find_places, vote

Float32Array = npt.NDArray[np.float32]

MAX_DRAFT = 64
ONLY_OWNER = 1  # a request's own text lies alone in its piece of the memory
# Columns of `requests`. The pages of the own text are those from START to END; the first NUM_CLEARED were made ready,
# NUM_ENTERED tokens are entered, IS_WHOLE says that these are all. REFERENCE is the row of another text, or NONE;
# TENANT the number of the owner of texts in the store, or 0.
START, END, NUM_CLEARED, NUM_ENTERED, IS_WHOLE, REFERENCE, TENANT = range(7)
NUM_COLUMNS = 7
NUM_ASKED = 5  # numbers of a request in Asked.rows


class Asked(NamedTuple):
    """What a step is asked for."""

    flat: Int32Array  # the ends of texts, one after the other, each with what was begun to be drafted
    rows: Int64Array  # [B * NUM_ASKED] row; its tokens in `flat`, new ones, those of all its text; how many to draft
    num_begun: int  # tokens that were begun, of all
    min_confidence: float  # a draft ends before a token that is less sure


class Kept(NamedTuple):
    """What is kept from step to step, and room to work in."""

    accept_probs: Float64Array  # [2, C] see first_chances
    requests: Int64Array  # [R, 7] see above
    newest: Int32Array  # [R, 2, K + 1] each request's newest draft: their number and the tokens; and their cells
    lines: Int32Array  # [2, 2, 2 * MAX_DRAFT] tokens and cells of the best draft, and of another
    places: Int64Array  # [MOST_PLACES]


class Drafts(NamedTuple):
    """What comes of a step."""

    tokens: Int32Array  # [B, K]
    num_draft: Int32Array  # [B]
    match_lengths: Float32Array  # [B] of the match that was taken


asked_type = types.Tuple((types.int32[::1], types.int64[::1], types.int64, types.float64))
kept_type = types.Tuple(
    (types.float64[:, ::1], types.int64[:, ::1], types.int32[:, :, ::1], types.int32[:, :, ::1], types.int64[::1])
)
drafts_type = types.Tuple((types.int32[:, ::1], types.int32[::1], types.float32[::1]))


@inlined
def _text_of(row: int, requests: Int64Array, own: Arrays) -> Arrays:
    """The piece of the memory where a row's text lies."""
    start, end = requests[row, START], requests[row, END]
    return Arrays(
        own.tokens[start * PAGE : end * PAGE],
        own.links[start * PAGE : end * PAGE],
        own.table[start * SLOTS_A_PAGE : end * SLOTS_A_PAGE],
        own.pages[start:end],
        own.state[row * NUM_FIELDS : (row + 1) * NUM_FIELDS],
    )


@inlined
def _enter_new(history: Int32Array, num_tokens: int, row: int, requests: Int64Array, own: Arrays) -> bool:
    """Enters the end of a text of which all the rest is there; whether there was room."""
    start = history.size - (num_tokens - requests[row, NUM_ENTERED])
    first = 0 if requests[row, NUM_ENTERED] else NONE
    next_one, _, _ = enter(history, start, first, ONLY_OWNER, EVERYTHING, _text_of(row, requests, own))
    left = history.size - next_one
    requests[row, NUM_ENTERED] = num_tokens - left
    requests[row, IS_WHOLE] = left == 0
    return left == 0


@compiled(types.int64(text_type, types.int64, types.int64, types.int64[:, ::1], arrays_type))
def enter_row(text: Int32Array, row: int, work: int, requests: Int64Array, own: Any) -> int:
    """Goes on to clear the piece of a row's text, and to enter that, as far as so much work goes; what is left."""
    requests, piece = borrowed(requests), _text_of(row, requests, borrowed_arrays(own))
    num_cleared, num_entered = requests[row, NUM_CLEARED], requests[row, NUM_ENTERED]
    if num_cleared < len(piece.pages):
        num_cleared, work = clear(num_cleared, work, piece)
    if 0 < num_cleared == len(piece.pages):
        num_entered, _, work = enter(borrowed(text), num_entered, 0 if num_entered else NONE, ONLY_OWNER, work, piece)
    requests[row, NUM_CLEARED], requests[row, NUM_ENTERED] = num_cleared, num_entered
    requests[row, IS_WHOLE] = num_entered == text.size
    return work


@compiled(types.int64(asked_type, kept_type, drafts_type, arrays_type, arrays_type))
def draft_step(asked: Any, kept: Any, drafts: Any, own: Any, store: Any) -> int:
    """Enters what is new of requests' own texts, and drafts from there, from references and from tenants' stores: the
    draft with the largest sum of confidences. How many own texts are not whole now, for want of pages.

    Args:
        asked: a tuple of Asked.
        kept: of Kept.
        drafts: of Drafts, which is written to.
        own: of Arrays, texts of rows; its state, [R * NUM_FIELDS], is of each row.
        store: of Arrays, texts of tenants.
    """
    flat, rows, num_begun, min_confidence = borrowed(asked[0]), borrowed(asked[1]), asked[2], asked[3]
    accept_probs, requests, newest = borrowed(kept[0]), borrowed(kept[1]), borrowed(kept[2])
    lines, places = borrowed(kept[3]), borrowed(kept[4])
    out, num_draft, match_lengths = borrowed(drafts[0]), borrowed(drafts[1]), borrowed(drafts[2])
    own, store = borrowed_arrays(own), borrowed_arrays(store)
    end, num_cut_off = 0, 0
    for index in range(len(out)):
        row, size, num_new, num_tokens, max_draft = rows[NUM_ASKED * index : NUM_ASKED * (index + 1)]
        ending = flat[end : end + size]
        end += size
        history = ending[: size - num_begun]
        drafted, cells = newest[row, 0], newest[row, 1]
        if num_new:
            learn(drafted, cells, history[history.size - num_new :], accept_probs)
        if num_tokens > requests[row, NUM_ENTERED] and requests[row, IS_WHOLE]:
            num_cut_off += not _enter_new(history, num_tokens, row, requests, own)
        most = num_begun + max_draft
        best, best_count, best_score, match_length = 0, num_begun, 0.0, 0
        for i in range(num_begun):
            lines[0, 0, i] = lines[1, 0, i] = ending[history.size + i]
        for source in range(3):
            if most == num_begun:
                break
            texts, owner = store, requests[row, TENANT]
            if source != STORE:
                other = row if source == OWN else requests[row, REFERENCE]
                is_there = other != NONE and requests[other, NUM_ENTERED] > 0
                if not is_there or (source == OWN and not requests[row, IS_WHOLE]):
                    continue
                texts, owner = _text_of(other, requests, own), ONLY_OWNER
            elif owner == 0:
                continue
            line = lines[1 - best]
            num_places, longest = find_places(ending, owner, places, texts)
            count, score, first = vote(
                places,
                num_places,
                longest,
                source,
                num_begun,
                most,
                min_confidence,
                accept_probs,
                line,
                texts,
            )
            if score > best_score:
                best, best_count, best_score, match_length = 1 - best, count, score, longest
                if source == STORE and store.pages[first, OLDER] != UNORDERED:
                    use(first, PROVEN, store.pages, store.state)
        count = best_count - num_begun
        num_draft[index], match_lengths[index] = count, match_length
        drafted[0] = count if num_begun == 0 else 0  # what comes next is not what the other draft is for
        for i in range(count):
            out[index, i] = drafted[i + 1] = lines[best, 0, num_begun + i]
            cells[i + 1] = lines[best, 1, num_begun + i]
    return num_cut_off
