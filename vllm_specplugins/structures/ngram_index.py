"""An incremental n-gram index of one text, for prompt-lookup drafting.

Saxena 2023 (prompt lookup decoding); Yang et al. 2023, "Inference with Reference" (LLMA). Knows nothing of
batches or engines. The work of a step does not grow with the text (its cache misses do), and its answer is
exact: hashes say where to look, tokens decide (`ngram_table`).

The text, a request's history or its reference, stays with the caller, who shows it at each call, as it was or grown at
its end. It is taken in by pieces, as large as an `Allowance` grants: a long text must not hold up a step.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplugins.structures.allowance import Allowance, Int64Array, work_of_making
from vllm_specplugins.structures.ngram_table import (
    ID_IS_NEGATIVE,
    IS_DONE,
    IS_GROWING,
    LARGEST_N,
    LAST_SHOWN,
    NEXT,
    NUM_CLEARED,
    NUM_MOVED,
    NUM_SHOWN,
    NUM_SLOTS_USED,
    enter_text,
    find_draft,
    find_match,
    move,
)

Int32Array = npt.NDArray[np.int32]

SMALLEST_TABLE = 64
NO_TABLE: Int64Array = np.zeros(0, np.int64)


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
        self._state = np.array([0, 0, min_ngram, max_ngram, multiplier, 0, 0, 0, -1, 0], np.int64)
        self._allowance.num_bytes += self.num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory held by the arrays."""
        larger = 0 if self._larger is None else self._larger.nbytes
        return self._table.nbytes + larger + self._state.nbytes

    def addresses(self) -> tuple[int, int, int]:
        """Where the table lies, how many slots it has, and where the state lies, until tokens are taken in."""
        return self._table.ctypes.data, len(self._table), self._state.ctypes.data

    def free(self) -> None:
        """Drops what the index holds; it must not be used again."""
        for table in (self._table, self._larger):
            if table is not None:
                self._allowance.drop_table(table)
        self._allowance.num_bytes -= self._state.nbytes
        self._table, self._larger, self._state = NO_TABLE, None, NO_TABLE

    # text: [num_tokens] int32, contiguous
    def continues(self, text: Int32Array) -> bool:
        """Whether a text still begins with the one that was last shown, judged by its length and last token."""
        held = self._state.item(NUM_SHOWN)
        return held == 0 or (held <= len(text) and text.item(held - 1) == self._state.item(LAST_SHOWN))

    # text: [num_tokens] int32, contiguous
    def num_left(self, text: Int32Array) -> int:
        """How much is left to be taken in: 0, or about as many tokens."""
        left = len(text) - 1 - self._state.item(NEXT)
        return left if left > 0 else int(self._larger is not None)

    # text: [num_tokens] int32, contiguous
    def take_in(self, text: Int32Array, most: int | None = None) -> bool:
        """Takes in the text as far as `most` work, and what is left of the allowance, goes; whether that was all of it.

        It waits for a larger table while the work left is less than making it takes, or dropped ones are in its place.
        ValueError if an id is negative, MemoryError if the allowance has no room for a larger table.
        """
        granted = self._allowance.work
        if most is not None and most < granted:
            granted = most
        work = granted
        self._state[NUM_SHOWN], self._state[LAST_SHOWN] = len(text), text.item(-1) if len(text) else -1
        while work > 0:
            if self._larger is not None:
                work = self._move_on(self._larger, work)
                continue
            why, work = enter_text(text, self._table, self._state, work)
            if why == ID_IS_NEGATIVE:
                raise ValueError(f"text holds the id {np.min(text)}; ids must be >= 0.")
            if why == IS_DONE:
                break
            if not (making := self._begin_to_grow(self.num_left(text), work)):
                break
            work -= making
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
        ending = np.concatenate((text[-LARGEST_N:], begun), dtype=np.int32) if len(begun) else text
        count, match_length = find_draft(text, self._table, self._state, ending, len(begun), max_tokens, out)
        if reference is not None:
            other = reference.index
            place, length = find_match(reference.text, other._table, other._state, ending, len(text) + len(begun))
            if length > match_length:
                tokens = reference.text[place + 1 : place + 1 + max_tokens]
                count, match_length = len(tokens), length
                out[:count] = tokens
        return out[:count], match_length

    def _begin_to_grow(self, num_left: int, work: int) -> int:
        """Makes a larger table, with room for one slot per token still to come: a prompt grows it once or twice.

        Returns the work that this took, 0 if it has to wait.
        """
        num_slots = int(self._state[NUM_SLOTS_USED]) + num_left + LARGEST_N
        size = max(2 * len(self._table), 1 << (4 * num_slots // 3).bit_length())
        making = work_of_making(size)
        if making <= work:
            self._larger = self._allowance.make_table(size)
            self._state[NUM_CLEARED] = self._state[NUM_MOVED] = 0
            self._state[IS_GROWING] = self._larger is not None
        return 0 if self._larger is None else making

    def _move_on(self, larger: Int64Array, work: int) -> int:
        """Goes on to move the slots into the larger table; the work that is left."""
        work = move(self._table, larger, self._state, work)
        if self._state[NUM_MOVED] == len(self._table):
            self._allowance.drop_table(self._table)
            self._table, self._larger = larger, None
            self._state[IS_GROWING] = 0
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
