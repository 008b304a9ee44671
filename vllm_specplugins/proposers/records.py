"""How often drafts were right, by request, stage and grade of confidence: in arrays, one row for each request.

For gates on the host, which go by these alone; kernels/calibration, which says why, has coarser ones and a regression.
R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.kernels.calibration import DECAY, PRIOR_WEIGHT
from vllm_specplugins.proposers.host import records as host
from vllm_specplugins.proposers.host.records import NUM_GRADES

SHARED_DECAY = 0.99  # of the record of all requests, by draft that has tokens of a grade
# What the record of all requests begins with, as if PRIOR_WEIGHT tokens had been tried, by grade: see host/records.py.
FIRST_GUESSES = 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]


def with_room(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """The array, or a longer one that begins like it, where it has fewer rows than that."""
    if num_rows <= len(array):
        return array
    return np.concatenate((array, np.zeros((max(num_rows - len(array), len(array)), *array.shape[1:]), array.dtype)))


class Rows:
    """Which row of our arrays a request has, from its first draft until it is forgotten. Row 0 is nobody's."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._newest: tuple[Sequence[str] | None, Ints] = (None, np.empty(0, np.int64))  # what was asked for last
        self._free: list[int] = []
        self.num_rows = 1

    def of(self, request_ids: Sequence[str]) -> Ints:
        """[R], rows of these requests; those that are new get one."""
        if request_ids == self._newest[0]:
            return self._newest[1]
        for request_id in request_ids:
            if request_id not in self._rows:
                if not self._free:
                    self._free.append(self.num_rows)
                    self.num_rows += 1
                self._rows[request_id] = self._free.pop()
        self._newest = request_ids[:], np.array([self._rows[request_id] for request_id in request_ids], np.int64)
        return self._newest[1]

    def known(self, request_ids: Sequence[str]) -> Ints:
        """[R], rows of these requests, 0 for those that have none."""
        if request_ids == self._newest[0]:
            return self._newest[1]
        return np.array([self._rows.get(request_id, 0) for request_id in request_ids], np.int64)

    def forget(self, request_ids: Sequence[str]) -> Ints:
        """The rows that these requests had, which others may get now."""
        self._newest = None, self._newest[1]
        rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
        self._free.extend(rows)
        return np.array(rows, np.int64)


class Records:
    """Decaying counts of tokens that could have been accepted, and of those that were. They grow with the requests."""

    def __init__(self, num_stages: int, num_rows: int = 1):
        shape = (num_rows, num_stages, NUM_GRADES)
        self._tried, self._accepted = np.zeros(shape), np.zeros(shape)
        self._shared_tried = np.full(shape[1:], PRIOR_WEIGHT)
        self._shared_accepted = self._shared_tried * np.array(FIRST_GUESSES)
        self.whole = np.zeros(shape[:2])  # length of the last draft if all of it was accepted

    @property
    def on_host(self) -> tuple[Any, ...]:
        """What the compiled functions go by."""
        return (
            *(self._tried, self._accepted, self._shared_tried, self._shared_accepted),
            PRIOR_WEIGHT,
        )

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        if num_rows > len(self.whole):
            self._tried, self._accepted, self.whole = (
                with_room(array, num_rows) for array in (self._tried, self._accepted, self.whole)
            )

    def clear(self, rows: Ints) -> None:
        """Forgets these requests."""
        for array in (self._tried, self._accepted, self.whole):
            array[rows] = 0

    def chances(self, rows: Ints, stage: int, confidence: Floats) -> Floats:
        """[R, K]: chance that each token is accepted, the ones before it being right.

        Args:
            rows: [R] int64.
            stage: of all of these tokens.
            confidence: [R, K], of the tokens.
        """
        found = np.empty_like(confidence)
        host.chances(found, self.on_host, rows, stage, confidence)
        return found

    def add(self, rows: Ints, stage: Ints, confidence: Floats, num_draft: Ints, num_accepted: Ints) -> None:
        """What became of drafts: tokens behind the first rejected one were not tried.

        Args:
            rows: [R] int64.
            stage, confidence: [R, K], of the tokens.
            num_draft, num_accepted: [R].
        """
        counts = self._tried, self._accepted, self._shared_tried, self._shared_accepted, self.whole
        fates = num_draft.astype(np.int64), num_accepted.astype(np.int64)
        host.add(*counts, rows, stage, confidence, *fates, DECAY, SHARED_DECAY)
