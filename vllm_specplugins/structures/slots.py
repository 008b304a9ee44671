"""Which row of our arrays a request has, from its first draft until it is forgotten."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]


def with_room(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """The array, or a longer one that begins like it, where it has fewer rows than that."""
    if num_rows <= len(array):
        return array
    return np.concatenate((array, np.zeros((max(num_rows - len(array), len(array)), *array.shape[1:]), array.dtype)))


class SlotTable:
    """R: requests of a step. Row 0 is nobody's."""

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
