"""The texts of requests that are being served, and their newest drafts: rows of arrays that compiled code works on."""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.structures.suffix_chains import NONE, Int32Array
from vllm_specplugins.structures.suffix_drafts import (
    FIRST_PAGE,
    IS_WHOLE,
    NUM_COLUMNS,
    NUM_ENTERED,
    OWNER,
    REFERENCE,
    TENANT,
    Float32Array,
    draft_step,
    first_chances,
)
from vllm_specplugins.structures.suffix_texts import Texts


class SuffixRequests:
    """A row is a request, or a text that requests search beside their own.

    Args:
        max_bytes: of the texts.
        num_rows: that there is room for at first.
        max_num_draft: K.
    """

    def __init__(self, max_bytes: int, num_rows: int, max_num_draft: int):
        self._texts = Texts(max_bytes)
        self._chances = first_chances()
        self._num_owners = 0
        self._leaving: deque[int] = deque()  # first pages of texts that are to be removed
        self._free: list[int] = []
        self._rows = np.zeros((0, NUM_COLUMNS), np.int64)
        self._newest = np.zeros((0, 2, max_num_draft + 1), np.int32)
        self._max_num_draft = max_num_draft
        self._grow(max(1, num_rows))

    @property
    def num_bytes(self) -> int:
        """Memory of all texts."""
        return self._texts.num_bytes

    @property
    def num_tokens(self) -> int:
        """Of all texts, those included that are being removed."""
        return self._texts.num_tokens

    def add(self) -> int:
        """A new row, of a text of which nothing is there."""
        if not self._free:
            self._grow(len(self._rows))
        row = self._free.pop()
        self._num_owners += 1
        self._rows[row] = 0
        self._rows[row, OWNER], self._rows[row, FIRST_PAGE] = self._num_owners, NONE
        self._newest[row] = 0
        return row

    def drop(self, row: int) -> None:
        """Frees a row; its text goes by and by."""
        if self._rows[row, FIRST_PAGE] != NONE:
            self._leaving.append(int(self._rows[row, FIRST_PAGE]))
        self._free.append(row)

    def search(self, row: int, other: int) -> None:
        """Has a request search the text of another row beside its own."""
        self._rows[row, REFERENCE] = self._rows[other, OWNER]

    def search_store(self, rows: Any, tenants: Any) -> None:
        """Has requests search the texts of these tenants, by number; 0 is none."""
        self._rows[rows, TENANT] = tenants

    def is_whole(self, row: int) -> bool:
        """Whether all of the text that was shown last is there; otherwise it is not searched."""
        return bool(self._rows[row, IS_WHOLE])

    # text: [num_tokens] int32, contiguous
    def num_left(self, row: int, text: Int32Array) -> int:
        """How many tokens of a row's text are not there yet."""
        return len(text) - int(self._rows[row, NUM_ENTERED])

    def enter(self, row: int, text: Int32Array, work: int) -> int:
        """Goes on to enter a row's text, as far as so much work, in looks into a table, goes; what is left of it."""
        own = self._rows[row]
        start, first, number = own[[NUM_ENTERED, FIRST_PAGE, OWNER]].tolist()
        start, first, work = self._texts.enter(text, start, first, number, work)
        own[NUM_ENTERED], own[FIRST_PAGE], own[IS_WHOLE] = start, first, start == len(text)
        return work

    def remove(self, work: int) -> int:
        """Goes on to remove texts of rows that were dropped; the work that is left."""
        while self._leaving and work > 0:
            first, work = self._texts.remove(self._leaving[0], work)
            if first == NONE:
                self._leaving.popleft()
            else:
                self._leaving[0] = first
        return work

    # flat: int32; rows: [num_reqs * 4] int64; wanted: [num_reqs] int32
    def step(
        self,
        flat: Int32Array,
        rows: npt.NDArray[np.int64],
        wanted: Int32Array,
        num_begun: int,
        min_confidence: float,
        store: Texts,
    ) -> tuple[Int32Array, Int32Array, Float32Array, int]:
        """See draft_step: tokens [num_reqs, K], their number [num_reqs], lengths of matches [num_reqs], and how many
        requests' texts are not whole any more, for want of room."""
        num_reqs = len(wanted)
        out = np.zeros((num_reqs, self._max_num_draft), np.int32)
        num_draft, match_lengths = np.empty(num_reqs, np.int32), np.empty(num_reqs, np.float32)
        num_cut_off: int = draft_step(
            *(flat, rows, wanted, num_begun, min_confidence, self._chances, self._rows, self._newest),
            *(out, num_draft, match_lengths, self._texts.arrays, store.arrays),
        )
        return out, num_draft, match_lengths, num_cut_off

    def _grow(self, more: int) -> None:
        count = len(self._rows)
        self._free += range(count + more - 1, count - 1, -1)
        self._rows = np.concatenate([self._rows, np.zeros((more, NUM_COLUMNS), np.int64)])
        self._newest = np.concatenate([self._newest, np.zeros((more, *self._newest.shape[1:]), np.int32)])
