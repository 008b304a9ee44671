"""Read-only views of the requests' texts, and where these lie in memory for compiled code."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Int32Array


def view(array: Int32Array) -> Int32Array:
    """The same memory, read-only for good: who sets `flags.writeable` gets a ValueError.

    >>> view(np.arange(3)).flags.writeable = True
    Traceback (most recent call last):
    ValueError: cannot set WRITEABLE flag to True of this array
    """
    return np.asarray(array.data.toreadonly())


class Views(tuple[Int32Array, ...]):
    """Arrays that `view` made, or slices of such: adapters that bring these spare a step a view of each request.

    Where they lie, and how long they are, [num_reqs] int64 each, may be known, too (see places_of).
    """

    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    # texts: [N, max_length] int32, read-only; lengths: [num_reqs]
    @classmethod
    def of_rows(cls, texts: Int32Array, rows: Sequence[int], lengths: Sequence[int]) -> "Views":
        """The texts of these rows."""
        views = cls(texts[row, :length] for row, length in zip(rows, lengths, strict=True))
        addresses = texts.ctypes.data + np.array(rows, np.int64) * texts.strides[0]
        views.places = addresses, np.array(lengths, np.int64)
        return views


def places_of(texts: Sequence[Int32Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where texts lie in memory, and how long they are, for compiled code that goes through many of them.

    TypeError unless they are contiguous int32.
    """
    known: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = getattr(texts, "places", None)
    if known is not None:
        return known
    for text in texts:
        if text.dtype != np.int32 or not text.flags.c_contiguous:
            raise TypeError(f"a text is {text.dtype} with strides {text.strides}; it must be contiguous int32.")
    return np.array([text.ctypes.data for text in texts], np.int64), np.array([len(text) for text in texts], np.int64)
