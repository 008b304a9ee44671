"""What a proposer gets to see: data in which nothing can be written that anybody else reads.

It keeps off code that writes where it should not, by mistake or on purpose. Code that digs for the owner of a buffer
(`array.base.obj`, `gc`, `ctypes`) is in the same process as the engine, and nothing keeps it off.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import DraftBatch, Feedback, Int32Array, Likeliest

_IMMUTABLE = frozenset({int, float, bool, str, bytes, type(None)})


def view(array: Int32Array) -> Int32Array:
    """The same memory, read-only for good: who sets `flags.writeable` gets a ValueError.

    >>> view(np.arange(3)).flags.writeable = True
    Traceback (most recent call last):
    ValueError: cannot set WRITEABLE flag to True of this array
    """
    return np.asarray(array.data.toreadonly())


def copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of a small array of one dimension that nobody can write to."""
    return np.frombuffer(array.tobytes(), array.dtype)


def frozen(value: Any) -> Any:
    """A copy of a client's value: tuples for lists, read-only dictionaries and arrays.

    >>> frozen({"a": [1, {"b": {2}}]})
    mappingproxy({'a': (1, mappingproxy({'b': frozenset({2})}))})
    """
    match value:
        case Mapping():
            return MappingProxyType({key: frozen(item) for key, item in value.items()})
        case list() | tuple():
            if _IMMUTABLE.issuperset(map(type, value)):  # as fast as a long list of ids deserves
                return tuple(value)
            return tuple(map(frozen, value))
        case set() | frozenset():
            return frozenset(value)
        case bytearray():
            return bytes(value)
        case np.ndarray():
            return view(np.array(value))
    return value


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
    found = [text.__array_interface__ for text in texts]
    for text in found:
        if text["typestr"] != "<i4" or text["strides"] is not None:
            raise TypeError(f"a text is {text['typestr']} with strides {text['strides']}; it must be contiguous int32.")
    return np.array([text["data"][0] for text in found], np.int64), np.array([len(text) for text in texts], np.int64)


def for_proposer(batch: DraftBatch) -> DraftBatch:
    """The batch that a proposer is handed in the place of the engine's own."""
    return DraftBatch(
        tuple(batch.request_ids),
        _views(batch.token_ids),
        copy(batch.max_num_draft),
        tuple(map(_frozen_options, batch.options)),
        batch.target,
        batch.offer,
        batch.likeliest,
    )


def rows_of(batch: DraftBatch, rows: Sequence[int], max_num_draft: Int32Array) -> DraftBatch:
    """Some requests of a batch, for a proposer that runs on the host: it sees neither target nor offer."""
    token_ids = _views(batch.token_ids)
    own = Views(token_ids[row] for row in rows)
    if token_ids.places is not None:
        addresses, lengths = token_ids.places
        own.places = addresses[rows], lengths[rows]
    return DraftBatch(
        tuple(batch.request_ids[row] for row in rows),
        own,
        copy(max_num_draft),
        tuple(_frozen_options(batch.options[row]) for row in rows),
        likeliest=likeliest_at(batch.likeliest, {row: place for place, row in enumerate(rows)}, batch.num_reqs),
    )


def likeliest_at(likeliest: Likeliest | None, places: Mapping[int, int], num_reqs: int) -> Likeliest | None:
    """That of those of num_reqs requests which have a place in another batch, in ascending order.

    >>> ids = np.array([7, 8, 9], np.int32)
    >>> likeliest_at(Likeliest(np.array([0, 1, 2], np.int32), ids, ids), {0: 0, 2: 1}, 3).requests.tolist()
    [0, 1]
    """
    if likeliest is None:
        return None
    place_of = np.full(num_reqs, -1, np.int32)
    place_of[list(places)] = list(places.values())
    requests = place_of[likeliest.requests]
    kept = requests >= 0
    return Likeliest(*(copy(array[kept]) for array in (requests, likeliest.token_ids, likeliest.next_ids)))


def feedback_for_proposer(feedback: Feedback) -> Feedback:
    """The feedback that a proposer is handed in the place of the engine's own."""
    return Feedback(
        tuple(feedback.request_ids), copy(feedback.num_draft), copy(feedback.num_accepted), feedback.step_ms
    )


def _views(token_ids: Sequence[Int32Array]) -> Views:
    return token_ids if type(token_ids) is Views else Views(map(view, token_ids))


def _frozen_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adapters freeze a request's options once."""
    if type(options) is MappingProxyType:
        return options
    result: Mapping[str, Any] = frozen(options)
    return result
