"""The n-gram indexes of all requests of a batch, asked at once: rows of an array that compiled code works on.

What is rare stays with NgramIndex: texts that are new, long or another's, tables that grow. R: requests of a batch, K:
most tokens of a draft. Texts, tables and states are told by their addresses; whoever calls keeps them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, types
from numba.extending import intrinsic

from vllm_specplugins.structures.compiled import compiled, inlined
from vllm_specplugins.structures.ngram_index import NgramIndex, Reference
from vllm_specplugins.structures.ngram_table import (
    IS_DONE,
    IS_GROWING,
    LARGEST_N,
    LAST_SHOWN,
    NEXT,
    NUM_SHOWN,
    enter_text,
    find_draft,
    find_match,
)

Int64Array = npt.NDArray[np.int64]

# Columns: addresses of the index's table and state, how many slots the table has; the row of the reference, or 0; and
# of a row that is a reference, its text's address and length.
TABLE, NUM_SLOTS, STATE, REFERENCE, TEXT, NUM_TOKENS = range(6)
NUM_COLUMNS = 6
NUM_FIELDS = IS_GROWING + 1  # of a state
# What is left to be done for a request: nothing; whatever NgramIndex does; the same, but its own work is spent.
TAKEN_IN, TO_BE_ASKED, SPENT = range(3)


def _as_pointer(typing: Any, address: Any) -> Any:
    """An address, for `carray`."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), make


_pointer: Any = intrinsic(_as_pointer)


@inlined
def _is_taken_in(state: Int64Array, num_tokens: int) -> bool:
    return bool(state[NEXT] >= num_tokens - 1 and state[IS_GROWING] == 0)


_ints, _rows = types.int64[::1], types.int64[:, ::1]


@compiled(types.int64(_ints, _ints, _ints, _ints, _rows, types.int64, _ints))
def take_in(
    texts: Int64Array,
    lengths: Int64Array,
    wanted: Int64Array,
    rows: Int64Array,
    table: Int64Array,
    work: int,
    fates: Any,
) -> int:
    """Enters the new tokens of requests that want a draft and have few; how many are not done with that.

    Args:
        texts, lengths: [R], of the requests' histories.
        wanted: [R], tokens.
        rows: [R], of the table; 0 for a request that has none.
        table: [N, NUM_COLUMNS]
        work: of each, see ngram_table; one that has more tokens left is not begun with.
        fates: [R], out: what is left to be done.
    """
    num_left = 0
    for index in range(len(rows)):
        fates[index] = TAKEN_IN
        if wanted[index] == 0:
            continue
        row, length = rows[index], lengths[index]
        fate = TO_BE_ASKED
        if row > 0:
            text = carray(_pointer(texts[index]), (length,), np.int32)
            state = carray(_pointer(table[row, STATE]), (NUM_FIELDS,), np.int64)
            shown = state[NUM_SHOWN]
            continues = shown == 0 or (shown <= length and text[shown - 1] == state[LAST_SHOWN])
            if continues and state[IS_GROWING] == 0 and length - 1 - state[NEXT] <= work:
                slots = carray(_pointer(table[row, TABLE]), (table[row, NUM_SLOTS],), np.int64)
                why, _ = enter_text(text, slots, state, work)
                state[NUM_SHOWN], state[LAST_SHOWN] = length, text[length - 1] if length > 0 else -1
                fate = TAKEN_IN if why == IS_DONE and _is_taken_in(state, length) else SPENT
            other = table[row, REFERENCE]
            if other > 0:
                others = carray(_pointer(table[other, STATE]), (NUM_FIELDS,), np.int64)
                if fate == TAKEN_IN and not _is_taken_in(others, table[other, NUM_TOKENS]):
                    fate = SPENT
        fates[index] = fate
        num_left += fate != TAKEN_IN
    return num_left


@compiled(
    types.void(
        *(_ints, _ints, _ints, _rows, types.Array(types.int32, 2, "C", readonly=True)),
        *(_ints, _ints, types.int32[:, ::1], _ints, types.float64[::1]),
    )
)
def draft(
    texts: Int64Array,
    lengths: Int64Array,
    rows: Int64Array,
    table: Int64Array,
    begun: Any,
    num_begun: Int64Array,
    wanted: Int64Array,
    out: Any,
    num_draft: Int64Array,
    match_lengths: Any,
) -> None:
    """See NgramIndex.draft; of all requests.

    Args:
        begun: [R, K] tokens that follow the histories.
        num_begun: [R], how many; empty: none of any request.
        out: [R, K], out, as are num_draft [R] and match_lengths [R].
        The others: see take_in.
    """
    ending = np.empty(LARGEST_N + begun.shape[1], np.int32)
    for index in range(len(rows)):
        row, length, most = rows[index], lengths[index], min(wanted[index], out.shape[1])
        num_draft[index], match_lengths[index] = 0, 0.0
        if row == 0 or most == 0:
            continue
        text = carray(_pointer(texts[index]), (length,), np.int32)
        state = carray(_pointer(table[row, STATE]), (NUM_FIELDS,), np.int64)
        other = table[row, REFERENCE]
        if not _is_taken_in(state, length):
            continue
        if other > 0:
            others = carray(_pointer(table[other, STATE]), (NUM_FIELDS,), np.int64)
            if not _is_taken_in(others, table[other, NUM_TOKENS]):
                continue
        num_more = num_begun[index] if len(num_begun) > 0 else 0
        own = min(length, LARGEST_N)
        for place in range(own):
            ending[place] = text[length - own + place]
        for place in range(num_more):
            ending[own + place] = begun[index, place]
        end = ending[: own + num_more]
        slots = carray(_pointer(table[row, TABLE]), (table[row, NUM_SLOTS],), np.int64)
        count, match_length = find_draft(text, slots, state, end, num_more, most, out[index])
        if other > 0:
            slots = carray(_pointer(table[other, TABLE]), (table[other, NUM_SLOTS],), np.int64)
            words = carray(_pointer(table[other, TEXT]), (table[other, NUM_TOKENS],), np.int32)
            place, longer = find_match(words, slots, others, end, length + num_more)
            if longer > match_length:
                count, match_length = min(most, len(words) - place - 1), longer
                for i in range(count):
                    out[index, i] = words[place + 1 + i]
        num_draft[index], match_lengths[index] = count, match_length


class NgramRows:
    """Which row of the table an index has. Row 0 is nobody's."""

    def __init__(self) -> None:
        self.table = np.zeros((16, NUM_COLUMNS), np.int64)
        self._free = list(range(15, 0, -1))

    def add(self, index: NgramIndex) -> int:
        """A row for an index."""
        if not self._free:
            count = len(self.table)
            self._free += range(2 * count - 1, count - 1, -1)
            self.table = np.concatenate((self.table, np.zeros_like(self.table)))
        row = self._free.pop()
        self.update(row, index)
        return row

    def add_reference(self, reference: Reference) -> int:
        """A row for a text beside requests' own."""
        row = self.add(reference.index)
        self.table[row, TEXT], self.table[row, NUM_TOKENS] = reference.text.ctypes.data, len(reference.text)
        return row

    def update(self, row: int, index: NgramIndex) -> None:
        """To be called whenever the index has taken in tokens by itself."""
        self.table[row, :REFERENCE] = index.addresses()

    def search(self, row: int, other: int) -> None:
        """Has a request's row search a reference's, too."""
        self.table[row, REFERENCE] = other

    def drop(self, row: int) -> None:
        """Frees a row."""
        self.table[row] = 0
        self._free.append(row)
