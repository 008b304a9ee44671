"""The table of an n-gram index, in compiled code: looking up, taking in by pieces, moving into a larger one.

Open addressing; a slot, int64, is `hash:28 | n-1:4 | repeated:1 | place:31`, or 0. It maps an n-gram to the
place of its latest occurrence: that of its last token, from 1. It is lazy: an (n+1)-gram is entered once its
n-token ending has occurred twice (`repeated`); while that occurred once, comparing tokens there gives every
longer match. Of 7 slots (n from 2 to 8) a token takes 1.0 (random text), 1.4 (source code), 3.5 (random text
twice). Memory: 11-22 bytes per used slot.
"""

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.compiled import compiled, inlined

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

LARGEST_N = 16  # n - 1 has four bits of a slot
REPEATED = 1 << 31
PLACE = REPEATED - 1
# Fields of the state array, which the class shares with the compiled code.
NEXT, NUM_SLOTS_USED, MIN_NGRAM, MAX_NGRAM, MULTIPLIER, NUM_CLEARED, NUM_MOVED = range(7)
NUM_SHOWN, LAST_SHOWN, IS_GROWING = range(7, 10)  # of the text that was shown last; whether a larger table is made
# Why enter_text ended.
IS_DONE, TABLE_IS_FULL, ID_IS_NEGATIVE = range(3)
# Work is counted in looks into a table, some 100 ns each where the caches are cold.
BLOCK = 64  # slots of a table that are cleared, or moved, at a time
CLEARING = 3  # the work of clearing them: it brings in the memory, at some microseconds a page
LOOKING_THROUGH = 2  # of looking whether they are used, and of
MOVED_PER_WORK = 2  # such as are, which go into a larger table

text_type = types.Array(types.int32, 1, "C", readonly=True)  # takes those that may be written, too
table_type = types.int64[::1]


@inlined
def _mix(hashed: int, token: int, multiplier: int) -> int:
    hashed = (hashed ^ token) * multiplier
    return hashed ^ (hashed >> 32)


@inlined
def _hash_ending(ending: Int32Array, last: int, n: int, multiplier: int) -> int:
    """Hash of the n tokens up to `last`, from right to left: one more `_mix` makes it that of n + 1."""
    hashed = 0
    for i in range(n):
        hashed = _mix(hashed, ending[last - i], multiplier)
    return hashed


@inlined
def _find(text: Int32Array, table: Int64Array, hashed: int, n: int, ending: Int32Array, last: int) -> tuple[int, int]:
    """Slot of the n-gram that `ending` has up to `last`, or the free one where it belongs; and its upper half."""
    key = hashed >> 36 << 4 | (n - 1)
    mask = table.size - 1
    slot = (key >> 4) & mask
    while table[slot] != 0:
        if table[slot] >> 32 == key:
            earlier = (table[slot] & PLACE) - 1
            i = 0
            while i < n and text[earlier - i] == ending[last - i]:
                i += 1
            if i == n:
                break
        slot = (slot + 1) & mask
    return slot, key << 32


@inlined
def _enter(text: Int32Array, table: Int64Array, state: Int64Array, last: int) -> int:
    """Make `last` the latest end of each n-gram that ends there; returns how many times it looked."""
    n, num_looks = state[MIN_NGRAM], 0
    max_n = min(state[MAX_NGRAM], last + 1)
    if n > max_n:
        return 1
    hashed = _hash_ending(text, last, n, state[MULTIPLIER])
    while n <= max_n:
        slot, key = _find(text, table, hashed, n, text, last)
        num_looks += 1
        entry = table[slot]
        if entry == 0:
            table[slot] = key | (last + 1)
            state[NUM_SLOTS_USED] += 1
            break
        table[slot] = key | REPEATED | (last + 1)
        earlier = (entry & PLACE) - 1
        if not entry & REPEATED and n < state[MAX_NGRAM] and earlier >= n:
            longer = _mix(hashed, text[earlier - n], state[MULTIPLIER])
            slot, key = _find(text, table, longer, n + 1, text, earlier)
            table[slot] = key | (earlier + 1)
            state[NUM_SLOTS_USED] += 1
            num_looks += 1
        if n < max_n:
            hashed = _mix(hashed, text[last - n], state[MULTIPLIER])
        n += 1
    return num_looks


@compiled(types.UniTuple(types.int64, 2)(text_type, table_type, table_type, types.int64))
def enter_text(text: Int32Array, table: Int64Array, state: Int64Array, work: int) -> tuple[int, int]:
    """Enter text[:-1] as far as this much work goes; why it ended, and the work that is left, which may be below 0.

    An n-gram is entered when the token after it exists: it cannot find itself, and each match goes on.
    """
    if state[NEXT] == 0 and text.size > 0 and text[0] < 0:
        return ID_IS_NEGATIVE, work
    while state[NEXT] < text.size - 1 and work > 0:
        if text[state[NEXT] + 1] < 0:
            return ID_IS_NEGATIVE, work
        if state[NUM_SLOTS_USED] > table.size * 3 // 4 - LARGEST_N:  # a token takes at most one slot per n
            return TABLE_IS_FULL, work
        work -= _enter(text, table, state, state[NEXT])
        state[NEXT] += 1
    return IS_DONE, work


@compiled(types.int64(table_type, table_type, table_type, types.int64))
def move(table: Int64Array, larger: Int64Array, state: Int64Array, work: int) -> int:
    """Clear the larger table and move the slots into it, as far as this much work goes; the work that is left."""
    while state[NUM_CLEARED] < larger.size and work > 0:
        start = state[NUM_CLEARED]
        end = min(larger.size, start + BLOCK)
        larger[start:end] = 0
        state[NUM_CLEARED] = end
        work -= CLEARING
    mask = larger.size - 1
    while state[NUM_MOVED] < table.size and work > 0:
        start = state[NUM_MOVED]
        end = min(table.size, start + BLOCK)
        num_used = 0
        for entry in table[start:end]:
            if entry != 0:
                slot = (entry >> 36) & mask
                while larger[slot] != 0:
                    slot = (slot + 1) & mask
                larger[slot] = entry
                num_used += 1
        state[NUM_MOVED] = end
        work -= LOOKING_THROUGH + num_used // MOVED_PER_WORK
    return work


@inlined
def _longest_match(
    text: Int32Array, table: Int64Array, state: Int64Array, ending: Int32Array, num_tokens: int
) -> tuple[int, int]:
    """Latest end in the text of the longest n-gram that ends `ending`, of num_tokens, and n; (0, 0) without one."""
    n, last = state[MIN_NGRAM], ending.size - 1
    max_n = min(state[MAX_NGRAM], num_tokens)
    match, match_length = 0, 0
    if n > max_n:
        return match, match_length
    hashed = _hash_ending(ending, last, n, state[MULTIPLIER])
    while n <= max_n:
        entry = table[_find(text, table, hashed, n, ending, last)[0]]
        if entry == 0:
            break
        match, match_length = (entry & PLACE) - 1, n
        if not entry & REPEATED:
            max_n = min(max_n, match + 1)
            while match_length < max_n and text[match - match_length] == ending[last - match_length]:
                match_length += 1
            break
        if n < max_n:
            hashed = _mix(hashed, ending[last - n], state[MULTIPLIER])
        n += 1
    return match, match_length


@compiled(types.UniTuple(types.int64, 2)(text_type, table_type, table_type, text_type, types.int64))
def find_match(
    text: Int32Array, table: Int64Array, state: Int64Array, ending: Int32Array, num_tokens: int
) -> tuple[int, int]:
    """The same, to be called from outside."""
    return _longest_match(text, table, state, ending, num_tokens)


@compiled(
    types.UniTuple(types.int64, 2)(
        *(text_type, table_type, table_type, text_type, types.int64, types.int64, types.int32[::1])
    )
)
def find_draft(
    text: Int32Array,
    table: Int64Array,
    state: Int64Array,
    ending: Int32Array,
    num_begun: int,
    max_tokens: int,
    out: Int32Array,
) -> tuple[int, int]:
    """Draft into `out` behind text and a begun draft, which `ending` ends; number of tokens, and match length."""
    end = text.size + num_begun
    match, match_length = _longest_match(text, table, state, ending, end)
    if match_length == 0:
        return 0, 0
    for i in range(max_tokens):  # the copy may overlap itself, as in LZ77
        place = match + 1 + i % (end - 1 - match)
        out[i] = text[place] if place < text.size else ending[place - end + ending.size]
    return max_tokens, match_length
