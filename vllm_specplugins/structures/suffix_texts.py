"""Texts of many owners, in memory that is there from the start."""

import secrets
from typing import Any

import numpy as np

from vllm_specplugins.structures.suffix_chains import (
    FOLLOWING,
    LEVELS,
    MULTIPLIER,
    NEWEST,
    NONE,
    NUM_FREE,
    NUM_TOKENS,
    OLDER,
    OLDEST,
    PAGE,
    UNORDERED,
    Int32Array,
    enter_text,
    read_text,
    remove_text,
)

MAX_LOAD = 0.75
PAGE_COLUMNS = 9
BYTES_PER_TOKEN = 4 + 4 * PAGE_COLUMNS / PAGE + len(LEVELS) * (8 + 8 / MAX_LOAD)
SMALLEST_BYTES = 1 << 16


class Texts:
    """What suffix_chains.py works on. A text is known by its first page, an owner by a number > 0.

    ValueError if max_bytes, which all arrays have together, is less than SMALLEST_BYTES.
    """

    def __init__(self, max_bytes: int):
        if max_bytes < SMALLEST_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least {SMALLEST_BYTES}.")
        self.num_pages = int(max_bytes / BYTES_PER_TOKEN) // PAGE
        num_places = self.num_pages * PAGE
        self.pages: Int32Array = np.zeros((self.num_pages, PAGE_COLUMNS), np.int32)
        self.state = np.zeros(8, np.int64)
        self.arrays = (
            _zeros((num_places,), np.int32),
            _zeros((len(LEVELS), num_places, 2), np.int32),
            _zeros((len(LEVELS), int(num_places / MAX_LOAD)), np.int64),
            self.pages,
            self.state,
        )
        self.clear()

    def clear(self) -> None:
        """Forgets all texts."""
        self.arrays[2].fill(0)
        self.pages[:, FOLLOWING] = np.arange(1, self.num_pages + 1)
        self.pages[-1, FOLLOWING] = NONE
        self.pages[:, OLDER] = UNORDERED
        self.state[:] = 0
        self.state[NUM_FREE], self.state[OLDEST], self.state[NEWEST] = self.num_pages, NONE, NONE
        self.state[MULTIPLIER] = secrets.randbits(63) | 1  # secret: nobody can write texts whose hashes collide

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
        """Enters text[start:] behind what is there of it, as far as so much work, in looks into a table, and free pages
        go. Where the rest begins, the first page of the text (in: NONE if there is nothing of it), the work left."""
        start, first, work = enter_text(text, start, first, owner, work, self.arrays)
        return start, first, work

    def remove(self, first: int, work: int) -> tuple[int, int]:
        """Removes a text from its end, as far as so much work goes; NONE if nothing is left of it, and the work."""
        first, work = remove_text(first, work, self.arrays)
        return first, work

    def read(self, first: int) -> Int32Array:
        """The tokens of a text."""
        text = np.empty(read_text(first, np.empty(0, np.int32), self.arrays[0], self.pages), np.int32)
        read_text(first, text, self.arrays[0], self.pages)
        return text


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros whose memory is there: it does not come page by page while requests are served."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array
