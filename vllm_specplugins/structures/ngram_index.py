"""An incremental n-gram index of one request's tokens, for prompt-lookup drafting.

Saxena 2023 (prompt lookup decoding); Yang et al. 2023, "Inference with Reference" (LLMA). Knows nothing of
batches or engines. The work of a step does not grow with the history (its cache misses do), and its answer is
exact: hashes say where to look, tokens decide.

Buffer: `[16 x -1, *reference, -1, *history]`, int32. No token equals -1, so no match reaches out of its text.
Table: open addressing; a slot, int64, is `hash:28 | n-1:4 | repeated:1 | position:31`, or 0. It maps an
n-gram to the last token of its latest occurrence. It is lazy: an (n+1)-gram is entered once its n-token
ending has occurred twice (`repeated`); while that occurred once, comparing tokens there gives every longer
match. Of 7 slots (n from 2 to 8) a token takes 1.0 (random text), 1.4 (source code), 3.5 (random text twice).
Memory: 4-8 bytes per token for the buffer, 11-22 bytes per used slot for the table.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_N = 16  # n - 1 has four bits of a slot
REPEATED = 1 << 31
POSITION = REPEATED - 1
# Fields of the state array, which the class shares with the compiled code.
NEXT, NUM_SLOTS_USED, HISTORY_START, MIN_NGRAM, MAX_NGRAM, MULTIPLIER = range(6)
# What _step answers instead of a number of draft tokens.
TABLE_IS_FULL, ID_IS_NEGATIVE = -1, -2

# Without it numba counts references, atomically, at each call: 23 ns per token taken in, and not 9.
inlined: Callable[[Function], Function] = njit(inline="always")


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile at import, for this signature only, and keep the machine code beside the module if possible."""

    def decorate(function: Function) -> Function:
        try:
            return njit(signature, cache=True)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # neither the package's folder nor the user's cache can be written
            return njit(signature)(function)  # type: ignore[no-any-return]

    return decorate


@inlined
def _mix(hashed: int, token: int, multiplier: int) -> int:
    hashed = (hashed ^ token) * multiplier
    return hashed ^ (hashed >> 32)


@inlined
def _hash_ending(buffer: Int32Array, last: int, n: int, multiplier: int) -> int:
    """Hash of the n tokens up to `last`, from right to left: one more `_mix` makes it that of n + 1."""
    hashed = 0
    for i in range(n):
        hashed = _mix(hashed, buffer[last - i], multiplier)
    return hashed


@inlined
def _find(buffer: Int32Array, table: Int64Array, hashed: int, n: int, last: int) -> tuple[int, int]:
    """Slot of the n-gram that ends at `last`, or the free one where it belongs; and the slot's upper half."""
    key = hashed >> 36 << 4 | (n - 1)
    mask = table.size - 1
    slot = (key >> 4) & mask
    while table[slot] != 0:
        if table[slot] >> 32 == key:
            earlier = table[slot] & POSITION
            i = 0
            while i < n and buffer[earlier - i] == buffer[last - i]:
                i += 1
            if i == n:
                break
        slot = (slot + 1) & mask
    return slot, key << 32


@inlined
def _enter(buffer: Int32Array, table: Int64Array, state: Int64Array, last: int) -> int:
    """Make `last` the latest end of each n-gram that ends there; returns how many slots that took."""
    start = state[HISTORY_START]
    if start - 2 <= last < start:  # nothing follows the reference's last token, and the separator is no token
        return 0
    n, num_taken = state[MIN_NGRAM], 0
    hashed = _hash_ending(buffer, last, n, state[MULTIPLIER])
    while n <= state[MAX_NGRAM]:
        slot, key = _find(buffer, table, hashed, n, last)
        entry = table[slot]
        if entry == 0:
            table[slot] = key | last
            return num_taken + 1
        table[slot] = key | REPEATED | last
        earlier = entry & POSITION
        if not entry & REPEATED and n < state[MAX_NGRAM]:
            longer = _mix(hashed, buffer[earlier - n], state[MULTIPLIER])
            slot, key = _find(buffer, table, longer, n + 1, earlier)
            table[slot] = key | earlier
            num_taken += 1
        hashed = _mix(hashed, buffer[last - n], state[MULTIPLIER])
        n += 1
    return num_taken


@inlined
def _longest_match(buffer: Int32Array, table: Int64Array, state: Int64Array, last: int) -> tuple[int, int]:
    """Latest earlier end of the longest n-gram that ends at `last`, and n; (0, 0) if there is none."""
    n = state[MIN_NGRAM]
    max_n = min(state[MAX_NGRAM], last + 1 - state[HISTORY_START])
    match, match_length = 0, 0
    hashed = _hash_ending(buffer, last, n, state[MULTIPLIER])
    while n <= max_n:
        entry = table[_find(buffer, table, hashed, n, last)[0]]
        if entry == 0:
            break
        match, match_length = entry & POSITION, n
        if not entry & REPEATED:
            while match_length < max_n and buffer[match - match_length] == buffer[last - match_length]:
                match_length += 1
            break
        hashed = _mix(hashed, buffer[last - n], state[MULTIPLIER])
        n += 1
    return match, match_length


@compiled("UniTuple(int64, 2)(int32[::1], int64[::1], int64[::1], int64, int64, int32[::1], boolean)")
def _step(
    buffer: Int32Array, table: Int64Array, state: Int64Array, end: int, max_tokens: int, out: Int32Array, enters: bool
) -> tuple[int, int]:
    """Index buffer[:end - 1] if `enters`, then draft into `out`: number of draft tokens, or why not; match length."""
    start = state[HISTORY_START]
    for i in range(max(start, state[NEXT] + 1), end):
        if buffer[i] < 0:
            return ID_IS_NEGATIVE, 0
    # An n-gram is entered when the token after it exists: it cannot find itself, and each match goes on.
    # One token takes at most one slot per n.
    while enters and state[NEXT] < end - 1:
        if state[NUM_SLOTS_USED] > table.size * 3 // 4 - LARGEST_N:
            return TABLE_IS_FULL, 0
        state[NUM_SLOTS_USED] += _enter(buffer, table, state, state[NEXT])
        state[NEXT] += 1
    if max_tokens == 0:
        return 0, 0
    match, match_length = _longest_match(buffer, table, state, end - 1)
    if match_length == 0:
        return 0, 0
    if match < start:
        max_tokens = min(max_tokens, start - 2 - match)
    for i in range(max_tokens):  # in the history the copy may overlap itself, as in LZ77
        out[i] = buffer[match + 1 + i % (end - 1 - match)]
    return max_tokens, match_length


@compiled("void(int64[::1], int64[::1])")
def _rehash(old_table: Int64Array, new_table: Int64Array) -> None:
    mask = new_table.size - 1
    for entry in old_table:
        if entry != 0:
            slot = (entry >> 36) & mask
            while new_table[slot] != 0:
                slot = (slot + 1) & mask
            new_table[slot] = entry


class NgramIndex:
    """Finds where the last tokens of a growing history occurred before, and drafts what followed.

    `reference` (predicted output, retrieved documents) is searched as text before the history; a draft from
    it ends where it ends. ValueError unless 1 <= min_ngram <= max_ngram <= 16 and the ids are >= 0.

    >>> index = NgramIndex(min_ngram=2, max_ngram=4)
    >>> draft, match_length = index.step([1, 2, 3, 4, 1, 2], max_tokens=3)
    >>> draft.tolist(), match_length
    ([3, 4, 1], 2)
    """

    def __init__(self, min_ngram: int, max_ngram: int, reference: Sequence[int] | None = None):
        if not 1 <= max_ngram <= LARGEST_N:
            raise ValueError(f"max_ngram is {max_ngram}; it must be 1 to {LARGEST_N}.")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram is {min_ngram}; it must be 1 to max_ngram, {max_ngram}.")
        text = np.asarray(() if reference is None else reference, np.int32)
        if len(text) and text.min() < 0:
            raise ValueError(f"reference holds the id {text.min()}; ids must be >= 0.")
        self._buffer = np.concatenate(([-1] * LARGEST_N, text, [-1]), dtype=np.int32)
        self._history_start = self._end = len(self._buffer)
        self._table = np.zeros(256, np.int64)
        multiplier = secrets.randbits(63) | 1  # secret: nobody can write a prompt whose n-grams collide
        self._state = np.array([LARGEST_N, 0, self._history_start, min_ngram, max_ngram, multiplier], np.int64)
        self.extend(())

    @property
    def num_tokens(self) -> int:
        """Length of the history, without the reference."""
        return self._end - self._history_start

    @property
    def last_token(self) -> int:
        """The history's newest token, -1 if there is none."""
        return int(self._buffer[self._end - 1])

    @property
    def num_bytes(self) -> int:
        """Memory held by the arrays."""
        return self._buffer.nbytes + self._table.nbytes + self._state.nbytes

    # tokens: [num_new] int32
    def extend(self, tokens: Int32Array | Sequence[int]) -> None:
        """Append tokens to the history. ValueError, and nothing is appended, if an id is negative."""
        self.step(tokens, 0)

    # out: [>= max_tokens] int32, contiguous
    def draft(self, max_tokens: int, out: Int32Array | None = None) -> tuple[Int32Array, int]:
        """What followed the longest earlier match of the last tokens, the latest one among equals.

        Returns the draft, int32 (the head of `out` if given, else a new array), and the length of the match:
        empty and 0 without one of min_ngram tokens, or if max_tokens is 0. A draft from the history has
        max_tokens tokens: where fewer follow the match, they repeat.
        """
        return self.step((), max_tokens, out)

    # tokens: [num_new] int32; out: [>= max_tokens] int32, contiguous
    def step(
        self, tokens: Int32Array | Sequence[int], max_tokens: int, out: Int32Array | None = None
    ) -> tuple[Int32Array, int]:
        """`extend`, then `draft`, in one compiled call: a decoding step."""
        draft, match_length, self._end = self._append_and_draft(tokens, max_tokens, out, enters=True)
        return draft, match_length

    # tokens: [num_new] int32
    def peek(self, tokens: Int32Array | Sequence[int], max_tokens: int) -> tuple[Int32Array, int]:
        """What `step` would draft after these tokens, but for matches that end in them; nothing is remembered."""
        draft, match_length, _ = self._append_and_draft(tokens, max_tokens, None, enters=False)
        return draft, match_length

    def _append_and_draft(
        self, tokens: Int32Array | Sequence[int], max_tokens: int, out: Int32Array | None, enters: bool
    ) -> tuple[Int32Array, int, int]:
        """Draft, length of the match, and the end of the tokens in the buffer."""
        if max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be >= 0.")
        if out is None:
            out = np.empty(max_tokens, np.int32)
        elif len(out) < max_tokens:
            raise ValueError(f"out has {len(out)} elements; it must have at least max_tokens, {max_tokens}.")
        end = self._end + len(tokens)
        if end > len(self._buffer):
            self._buffer.resize(2 * end, refcheck=False)  # no view of it leaves this class
        self._buffer[self._end : end] = tokens
        while (result := _step(self._buffer, self._table, self._state, end, max_tokens, out, enters))[0] < 0:
            if result[0] == ID_IS_NEGATIVE:
                raise ValueError(f"tokens holds the id {np.min(tokens)}; ids must be >= 0.")
            # Room for one slot per token still to come: a prompt grows the table once or twice.
            self._grow_table(int(self._state[NUM_SLOTS_USED] + end - self._state[NEXT]) + LARGEST_N)
        return out[: result[0]], result[1], end

    def _grow_table(self, num_slots: int) -> None:
        table = np.zeros(max(2 * len(self._table), 1 << (4 * num_slots // 3).bit_length()), np.int64)
        _rehash(self._table, table)
        self._table = table
