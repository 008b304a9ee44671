"""Stores each request's row until the request is forgotten, and the addresses of texts. Nothing here is compiled, since
the plugin's front end imports it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Int32Array

Array = Any  # of NumPy, or a torch.Tensor
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]


def with_room(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """Returns the array, padded with zero rows to this number of rows."""
    if num_rows <= len(array):
        return array
    return np.concatenate((array, np.zeros((max(num_rows - len(array), len(array)), *array.shape[1:]), array.dtype)))


class SlotTable:
    """Assigns rows to requests, numbered from 1. R: requests of a step."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._newest: tuple[Sequence[str] | None, Ints] = (None, np.empty(0, np.int64))
        self._free: list[int] = []
        self.num_rows = 1

    def of(self, request_ids: Sequence[str]) -> Ints:
        """Returns the rows of these requests, [R], and assigns rows to new requests."""
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
        """Returns the rows of these requests, [R], with 0 for requests without a row."""
        if request_ids == self._newest[0]:
            return self._newest[1]
        return np.array([self._rows.get(request_id, 0) for request_id in request_ids], np.int64)

    def forget(self, request_ids: Sequence[str]) -> Ints:
        """Frees the rows of these requests, and returns them."""
        self._newest = None, self._newest[1]
        rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
        self._free.extend(rows)
        return np.array(rows, np.int64)


def view(array: Int32Array) -> Int32Array:
    """Returns the same memory as a permanently read-only array: setting `flags.writeable` raises ValueError.

    >>> view(np.arange(3)).flags.writeable = True
    Traceback (most recent call last):
    ValueError: cannot set WRITEABLE flag to True of this array
    """
    return np.asarray(array.data.toreadonly())


class Views(tuple[Int32Array, ...]):
    """Arrays from `view`, or slices of them, which proposers receive without a copy. `places`, if known, holds their
    addresses and lengths (see places_of)."""

    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    # texts: [N, width] int32, read-only; lengths: [num_reqs]
    @classmethod
    def of_rows(cls, texts: Int32Array, rows: Sequence[int], lengths: Sequence[int]) -> "Views":
        views = cls(texts[row, :length] for row, length in zip(rows, lengths, strict=True))
        addresses = texts.ctypes.data + np.array(rows, np.int64) * texts.strides[0]
        views.places = addresses, np.array(lengths, np.int64)
        return views


def places_of(texts: Sequence[Int32Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the addresses and lengths of texts for compiled code, [num_reqs] int64. Raises TypeError unless all are
    contiguous int32."""
    known: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = getattr(texts, "places", None)
    if known is not None:
        return known
    for text in texts:
        if text.dtype != np.int32 or not text.flags.c_contiguous:
            raise TypeError(f"a text is {text.dtype} with strides {text.strides}; it must be contiguous int32.")
    return np.array([text.ctypes.data for text in texts], np.int64), np.array([len(text) for text in texts], np.int64)
