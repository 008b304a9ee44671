"""The texts of requests that are being served, and their newest drafts: rows of arrays that compiled code works on.

Each text has a piece of the memory of its own, with some room to grow. It is small as a rule, so that the caches hold
its tables while it is entered, and nothing has to be removed: a piece is cleared when another text gets it.
"""

from typing import Any

import numpy as np

from vllm_specplugins.structures.spans import SpanAllocator
from vllm_specplugins.structures.suffix.acceptance import first_accept_probs
from vllm_specplugins.structures.suffix.drafts import (
    END,
    IS_WHOLE,
    MAX_DRAFT,
    NUM_ASKED,
    NUM_CLEARED,
    NUM_COLUMNS,
    NUM_ENTERED,
    REFERENCE,
    START,
    TENANT,
    Asked,
    Drafts,
    Kept,
    draft_step,
    enter_row,
)
from vllm_specplugins.structures.suffix.pages import MULTIPLIER, NONE, NUM_FIELDS, NUM_TOKENS, PAGE, Int32Array
from vllm_specplugins.structures.suffix.search import MOST_PLACES
from vllm_specplugins.structures.suffix.texts import Texts, new_arrays

SPARE_SHARE, SPARE_TOKENS = 4, 512  # room to grow: one part in so many of a text, and so many tokens


class SuffixRequests:
    """A row is a request, or a text that requests search beside their own.

    Args:
        max_bytes: of the texts.
        num_rows: that there is room for at first.
        max_num_draft: K.
    """

    def __init__(self, max_bytes: int, num_rows: int, max_num_draft: int):
        self._arrays = new_arrays(max_bytes)
        self._multiplier = self._arrays.state[MULTIPLIER]
        self._spans = SpanAllocator(len(self._arrays.pages))
        self._free: list[int] = []
        lines, places = np.empty((2, 2, 2 * MAX_DRAFT), np.int32), np.empty(MOST_PLACES, np.int64)
        newest = np.zeros((0, 2, max_num_draft + 1), np.int32)
        self._kept = Kept(first_accept_probs(), np.zeros((0, NUM_COLUMNS), np.int64), newest, lines, places)
        self._states = np.zeros((0, NUM_FIELDS), np.int64)
        self._max_num_draft = max_num_draft
        self._grow(max(1, num_rows))

    @property
    def num_bytes(self) -> int:
        """Memory of all texts."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return int(self._states[:, NUM_TOKENS].sum())

    def add(self) -> int:
        """A new row, of a text of which nothing is there."""
        if not self._free:
            self._grow(len(self._states))
        row = self._free.pop()
        self._kept.requests[row] = 0
        self._kept.requests[row, REFERENCE] = NONE
        self._kept.newest[row] = 0
        return row

    def drop(self, row: int) -> None:
        """Frees a row, and the room of its text."""
        self._leave_room(row)
        self._free.append(row)

    def search(self, row: int, other: int) -> None:
        """Has a request search the text of another row beside its own."""
        self._kept.requests[row, REFERENCE] = other

    def search_store(self, rows: Any, tenants: Any) -> None:
        """Has requests search the texts of these tenants, by number; 0 is none."""
        self._kept.requests[rows, TENANT] = tenants

    def forget_chances(self) -> None:
        """Drops what was learnt of how often drafts are right."""
        self._kept.accept_probs[:] = first_accept_probs()

    def is_whole(self, row: int) -> bool:
        """Whether all of the text that was shown last is there; otherwise it is not searched."""
        return bool(self._kept.requests[row, IS_WHOLE])

    # text: [num_tokens] int32, contiguous
    def num_left(self, row: int, text: Int32Array) -> int:
        """How many tokens of a row's text are not there yet."""
        return len(text) - int(self._kept.requests[row, NUM_ENTERED])

    def enter(self, row: int, text: Int32Array, work: int) -> int:
        """Goes on to enter a row's text, as far as so much work, in looks into a table, goes; what is left of it.

        A text that needs more room than it has gets another piece, and begins anew; without one nothing is entered.
        """
        start, end = self._kept.requests[row, :NUM_CLEARED].tolist()
        if len(text) > (end - start) * PAGE:
            self._find_room(row, len(text))
        left: int = enter_row(text, row, work, self._kept.requests, tuple(self._arrays))
        return left

    def step(self, asked: Asked, store: Texts) -> tuple[Drafts, int]:
        """See draft_step: drafts, and how many requests' texts are not whole any more, for want of room."""
        num_reqs = len(asked.rows) // NUM_ASKED
        drafts = Drafts(
            np.zeros((num_reqs, self._max_num_draft), np.int32),
            np.empty(num_reqs, np.int32),
            np.empty(num_reqs, np.float32),
        )
        num_cut_off: int = draft_step(
            tuple(asked), tuple(self._kept), tuple(drafts), tuple(self._arrays), tuple(store.arrays)
        )
        return drafts, num_cut_off

    def _find_room(self, row: int, num_tokens: int) -> None:
        """Another piece for a text of so many tokens, instead of the one that it has; none if there is none."""
        self._leave_room(row)
        num_pages = -(-(num_tokens + num_tokens // SPARE_SHARE + SPARE_TOKENS) // PAGE)
        start = self._spans.take(num_pages)
        if start is not None:
            self._kept.requests[row, START], self._kept.requests[row, END] = start, start + num_pages

    def _leave_room(self, row: int) -> None:
        start, end = self._kept.requests[row, :NUM_CLEARED].tolist()
        if end > start:
            self._spans.give_back(start, end - start)
        self._kept.requests[row, : IS_WHOLE + 1] = 0
        self._states[row] = 0
        self._states[row, MULTIPLIER] = self._multiplier

    def _grow(self, more: int) -> None:
        count, kept = len(self._states), self._kept
        self._free += range(count + more - 1, count - 1, -1)
        requests = np.concatenate([kept.requests, np.zeros((more, NUM_COLUMNS), np.int64)])
        newest = np.concatenate([kept.newest, np.zeros((more, *kept.newest.shape[1:]), np.int32)])
        self._kept = kept._replace(requests=requests, newest=newest)
        self._states = np.concatenate([self._states, np.zeros((more, NUM_FIELDS), np.int64)])
        self._states[count:, MULTIPLIER] = self._multiplier
        self._arrays = self._arrays._replace(state=self._states.reshape(-1))
