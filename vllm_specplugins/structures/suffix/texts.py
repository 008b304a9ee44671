"""Texts of many owners, in memory that is there from the start."""

import secrets
from typing import Any

import numpy as np

from vllm_specplugins.structures.suffix.chains import LEVELS, SLOTS_A_PAGE, clear_all, enter_text, remove_text
from vllm_specplugins.structures.suffix.pages import (
    MULTIPLIER,
    NEWEST,
    NONE,
    NUM_FIELDS,
    NUM_FREE,
    NUM_PAGE_COLUMNS,
    NUM_TOKENS,
    OLDEST,
    PAGE,
    Arrays,
    Int32Array,
    read_text,
)

BYTES_PER_TOKEN = 4 + 4 * NUM_PAGE_COLUMNS / PAGE + 8 * len(LEVELS) * (1 + SLOTS_A_PAGE / PAGE)
SMALLEST_BYTES = 1 << 16


def new_arrays(max_bytes: int) -> Arrays:
    """As many pages as go into max_bytes; not cleared. ValueError if max_bytes is less than SMALLEST_BYTES."""
    if max_bytes < SMALLEST_BYTES:
        raise ValueError(f"max_bytes is {max_bytes}; it must be at least {SMALLEST_BYTES}.")
    num_pages = int(max_bytes / BYTES_PER_TOKEN) // PAGE
    return Arrays(
        _zeros((num_pages * PAGE,), np.int32),
        _zeros((num_pages * PAGE, len(LEVELS), 2), np.int32),
        _zeros((num_pages * SLOTS_A_PAGE, len(LEVELS)), np.int64),
        _zeros((num_pages, NUM_PAGE_COLUMNS), np.int32),
        new_state(),
    )


def new_state() -> Any:
    """[9] int64, of texts of which there are none."""
    state = np.zeros(NUM_FIELDS, np.int64)
    state[OLDEST : OLDEST + 2] = state[NEWEST : NEWEST + 2] = NONE
    state[MULTIPLIER] = secrets.randbits(63) | 1  # secret: nobody can write texts whose hashes collide
    return state


class Texts:
    """What chains.py works on. A text is known by its first page, an owner by a number > 0.

    ValueError if max_bytes, which all arrays have together, is less than SMALLEST_BYTES.
    """

    def __init__(self, max_bytes: int):
        self.arrays = new_arrays(max_bytes)
        self.pages, self.state = self.arrays.pages, self.arrays.state
        self.num_pages = len(self.pages)
        self.clear()

    def clear(self) -> None:
        """Forgets all texts."""
        self.state[:] = new_state()
        clear_all(tuple(self.arrays))

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return int(self.state[NUM_TOKENS])

    @property
    def num_free(self) -> int:
        """Pages that no text has."""
        return int(self.state[NUM_FREE])

    # text: [num_tokens] int32, contiguous
    def enter(self, text: Int32Array, start: int, first: int, owner: int, work: int) -> tuple[int, int, int]:
        """Enters text[start:] after what is there of it, as far as so much work, in looks into a table, and free pages
        go. Where the rest begins, the first page of the text (in: NONE if there is nothing of it), the work left."""
        start, first, work = enter_text(text, start, first, owner, work, tuple(self.arrays))
        return start, first, work

    def remove(self, first: int, work: int) -> tuple[int, int]:
        """Removes a text from its end, as far as so much work goes; NONE if nothing is left of it, and the work."""
        first, work = remove_text(first, work, tuple(self.arrays))
        return first, work

    def read(self, first: int) -> Int32Array:
        """The tokens of a text."""
        text = np.empty(read_text(first, np.empty(0, np.int32), self.arrays.tokens, self.pages), np.int32)
        read_text(first, text, self.arrays.tokens, self.pages)
        return text


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros whose memory is there: it does not come page by page while requests are served."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array
