"""An incremental n-gram index of one text, for prompt-lookup drafting.

Saxena 2023 (prompt lookup decoding); Yang et al. 2023, "Inference with Reference" (LLMA). Knows nothing of
batches or engines. The work of a step does not grow with the text (its cache misses do), and its answer is
exact: hashes say where to look, tokens decide.

The text, a request's history or its reference, stays with the caller, who shows it at each call, as it was or grown at
its end. It is taken in by pieces, as large as an `Allowance` grants: a long text must not hold up a step.
Table: open addressing; a slot, int64, is `hash:28 | n-1:4 | repeated:1 | place:31`, or 0. It maps an
n-gram to the place of its latest occurrence: that of its last token, from 1. It is lazy: an (n+1)-gram is
entered once its n-token ending has occurred twice (`repeated`); while that occurred once, comparing tokens
there gives every longer match. Of 7 slots (n from 2 to 8) a token takes 1.0 (random text), 1.4 (source
code), 3.5 (random text twice). Memory: 11-22 bytes per used slot.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit, types

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_N = 16  # n - 1 has four bits of a slot
REPEATED = 1 << 31
PLACE = REPEATED - 1
SMALLEST_TABLE = 64
# Fields of the state array, which the class shares with the compiled code.
NEXT, NUM_SLOTS_USED, MIN_NGRAM, MAX_NGRAM, MULTIPLIER, NUM_CLEARED, NUM_MOVED = range(7)
# Why _enter_text ended.
IS_DONE, TABLE_IS_FULL, ID_IS_NEGATIVE = range(3)
# Work is counted in looks into a table, some 100 ns each where the caches are cold. As long takes
BLOCK = 64  # slots of a new table to be cleared, page faults included; or as many to be looked through twice, and
MOVED_PER_WORK = 2  # used ones that go into a larger table.

text_type = types.Array(types.int32, 1, "C", readonly=True)  # takes those that may be written, too
table_type = types.int64[::1]

# Without it numba counts references, atomically, at each call: 23 ns per token taken in, and not 9.
inlined: Callable[[Function], Function] = njit(inline="always")


def compiled(signature: Any) -> Callable[[Function], Function]:
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
def _enter_text(text: Int32Array, table: Int64Array, state: Int64Array, work: int) -> tuple[int, int]:
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
def _move(table: Int64Array, larger: Int64Array, state: Int64Array, work: int) -> int:
    """Clear the larger table and move the slots into it, as far as this much work goes; the work that is left."""
    while state[NUM_CLEARED] < larger.size and work > 0:
        start = state[NUM_CLEARED]
        end = min(larger.size, start + BLOCK)
        larger[start:end] = 0
        state[NUM_CLEARED] = end
        work -= 1
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
        work -= 2 + num_used // MOVED_PER_WORK
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


@compiled(
    types.UniTuple(types.int64, 2)(
        *(text_type, table_type, table_type),
        *(text_type, table_type, table_type),
        *(text_type, types.int64, types.int64, types.int32[::1]),
    )
)
def _draft(
    history: Int32Array,
    table: Int64Array,
    state: Int64Array,
    reference: Int32Array,
    reference_table: Int64Array,
    reference_state: Int64Array,
    ending: Int32Array,
    num_begun: int,
    max_tokens: int,
    out: Int32Array,
) -> tuple[int, int]:
    """Draft into `out` behind history and a begun draft, which `ending` ends; number of tokens, and match length."""
    end = history.size + num_begun
    match, match_length = _longest_match(history, table, state, ending, end)
    if reference.size > 0:
        there, length = _longest_match(reference, reference_table, reference_state, ending, end)
        if length > match_length:
            max_tokens = min(max_tokens, reference.size - 1 - there)
            for i in range(max_tokens):
                out[i] = reference[there + 1 + i]
            return max_tokens, length
    if match_length == 0:
        return 0, 0
    for i in range(max_tokens):  # the copy may overlap itself, as in LZ77
        place = match + 1 + i % (end - 1 - match)
        out[i] = history[place] if place < history.size else ending[place - end + ending.size]
    return max_tokens, match_length


@dataclass(slots=True)
class Allowance:
    """What indexes may do and hold together.

    Args:
        work: what is left of it, in looks into a table, until somebody grants more; below 0 by a few at most.
        max_bytes: of their tables.
        num_bytes: what they hold of these.
    """

    work: int = 1 << 62
    max_bytes: int = 1 << 62
    num_bytes: int = 0


class NgramIndex:
    """Finds where the last tokens of a text occurred before, and drafts what followed.

    ValueError unless 1 <= min_ngram <= max_ngram <= 16.

    >>> index, text = NgramIndex(min_ngram=2, max_ngram=4), np.array([1, 2, 3, 4, 1, 2], np.int32)
    >>> index.take_in(text)
    True
    >>> draft, match_length = index.draft(text, max_tokens=3)
    >>> draft.tolist(), match_length
    ([3, 4, 1], 2)
    """

    def __init__(self, min_ngram: int, max_ngram: int, allowance: Allowance | None = None):
        if not 1 <= max_ngram <= LARGEST_N:
            raise ValueError(f"max_ngram is {max_ngram}; it must be 1 to {LARGEST_N}.")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram is {min_ngram}; it must be 1 to max_ngram, {max_ngram}.")
        self._allowance = allowance or Allowance()
        self._table = np.zeros(SMALLEST_TABLE, np.int64)
        self._larger: Int64Array | None = None  # while the table's slots are moved into it
        multiplier = secrets.randbits(63) | 1  # secret: nobody can write a prompt whose n-grams collide
        self._state = np.array([0, 0, min_ngram, max_ngram, multiplier, 0, 0], np.int64)
        self._num_tokens, self._last_token = 0, -1
        self._allowance.num_bytes += self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory held by the arrays."""
        larger = 0 if self._larger is None else self._larger.nbytes
        return self._table.nbytes + larger + self._state.nbytes

    def free(self) -> None:
        """Gives back what the index holds; it must not be used again."""
        self._allowance.num_bytes -= self.num_bytes
        self._table, self._larger, self._state = self._table[:0], None, self._state[:0]

    # text: [num_tokens] int32, contiguous
    def continues(self, text: Int32Array) -> bool:
        """Whether a text still begins with the one that was last shown, judged by its length and last token."""
        held = self._num_tokens
        return held == 0 or (held <= len(text) and bool(text[held - 1] == self._last_token))

    # text: [num_tokens] int32, contiguous
    def num_left(self, text: Int32Array) -> int:
        """How much is left to be taken in: 0, or about as many tokens."""
        left = len(text) - 1 - int(self._state[NEXT])
        return max(left, 0 if self._larger is None else 1)

    # text: [num_tokens] int32, contiguous
    def take_in(self, text: Int32Array, most: int | None = None) -> bool:
        """Takes in the text as far as `most` work, and what is left of the allowance, goes; whether that was all of it.

        ValueError if an id is negative, MemoryError if the allowance has no room for a larger table.
        """
        granted = self._allowance.work if most is None else min(most, self._allowance.work)
        work = granted
        self._num_tokens, self._last_token = len(text), int(text[-1]) if len(text) else -1
        while work > 0:
            if self._larger is not None:
                work = self._move_on(self._larger, work)
                continue
            why, work = _enter_text(text, self._table, self._state, work)
            if why == ID_IS_NEGATIVE:
                raise ValueError(f"text holds the id {np.min(text)}; ids must be >= 0.")
            if why == IS_DONE:
                break
            self._begin_to_grow(self.num_left(text))
        self._allowance.work -= granted - work
        return self.num_left(text) == 0

    # text: [num_tokens] int32, contiguous, taken in; out: [>= max_tokens] int32, contiguous
    def draft(
        self,
        text: Int32Array,
        max_tokens: int,
        out: Int32Array | None = None,
        begun: Sequence[int] = (),
        reference: "Reference | None" = None,
    ) -> tuple[Int32Array, int]:
        """What followed the longest earlier match of the last tokens, the latest one among equals.

        Args:
            text: what was taken in.
            max_tokens: most tokens to draft.
            out: where the draft goes; a new array without it.
            begun: tokens that follow the text, which are not remembered: no match ends in them.
            reference: another text to be searched, taken in as well. Its matches must be longer than the text's own.

        Returns the draft, int32 (the head of `out`), and the length of the match: empty and 0 without one of min_ngram
        tokens, or if max_tokens is 0. A draft from the text has max_tokens tokens: where fewer follow the match, they
        repeat. One from a reference ends where that ends.
        """
        if max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be >= 0.")
        if out is None:
            out = np.empty(max_tokens, np.int32)
        elif len(out) < max_tokens:
            raise ValueError(f"out has {len(out)} elements; it must have at least max_tokens, {max_tokens}.")
        if max_tokens == 0:
            return out[:0], 0
        ending = np.array([*text[-LARGEST_N:], *begun], np.int32) if len(begun) else text
        other = NOTHING if reference is None else reference
        count, match_length = _draft(
            text,
            self._table,
            self._state,
            other.text,
            other.index._table,
            other.index._state,
            ending,
            len(begun),
            max_tokens,
            out,
        )
        return out[:count], match_length

    def _begin_to_grow(self, num_left: int) -> None:
        """Makes a larger table, with room for one slot per token still to come: a prompt grows it once or twice."""
        num_slots = int(self._state[NUM_SLOTS_USED]) + num_left + LARGEST_N
        size = max(2 * len(self._table), 1 << (4 * num_slots // 3).bit_length())
        if self._allowance.num_bytes + 8 * size > self._allowance.max_bytes:
            raise MemoryError(f"{8 * size} bytes more than {self._allowance.num_bytes} are not allowed.")
        self._larger = np.empty(size, np.int64)
        self._state[NUM_CLEARED] = self._state[NUM_MOVED] = 0
        self._allowance.num_bytes += self._larger.nbytes

    def _move_on(self, larger: Int64Array, work: int) -> int:
        """Goes on to move the slots into the larger table; the work that is left."""
        work = _move(self._table, larger, self._state, work)
        if self._state[NUM_MOVED] == len(self._table):
            self._allowance.num_bytes -= self._table.nbytes
            self._table, self._larger = larger, None
        return work


@dataclass(frozen=True, slots=True)
class Reference:
    """A text beside a request's own, and its index. Several requests may search it.

    Args:
        text: [num_tokens] int32, contiguous.
        index: of the text.
    """

    text: Int32Array
    index: NgramIndex


NOTHING = Reference(np.empty(0, np.int32), NgramIndex(1, 1))
