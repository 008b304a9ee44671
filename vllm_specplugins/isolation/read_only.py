"""What a proposer gets to see: data in which nothing can be written that anybody else reads.

It keeps off code that writes where it should not, by mistake or on purpose. Code that digs for the owner of a buffer
(`array.base.obj`, `gc`, `ctypes`) is in the same process as the engine, and nothing keeps it off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import ArgmaxTokens, DraftBatch, Feedback, Int32Array
from vllm_specplugins.structures.views import Views, view

_IMMUTABLE = frozenset({int, float, bool, str, bytes, type(None)})


def copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of a small array of one dimension that nobody can write to."""
    return np.frombuffer(array.tobytes(), array.dtype)


def frozen(value: Any) -> Any:
    """A copy of a client's value: tuples for lists, read-only dictionaries and arrays.

    >>> frozen({"a": [1, {"b": 2}]})
    mappingproxy({'a': (1, mappingproxy({'b': 2}))})
    """
    match value:
        case MappingProxyType():
            return value  # adapters freeze a request's options once
        case Mapping():
            return MappingProxyType({key: frozen(item) for key, item in value.items()})
        case list() | tuple():
            if _IMMUTABLE.issuperset(map(type, value)):  # as fast as a long list of ids deserves
                return tuple(value)
            return tuple(map(frozen, value))
        case np.ndarray():
            return view(np.array(value))
    return value


def for_proposer(batch: DraftBatch) -> DraftBatch:
    """The batch that a proposer is handed in the place of the engine's own."""
    return replace(
        batch,
        request_ids=tuple(batch.request_ids),
        token_ids=_views(batch.token_ids),
        max_num_draft=copy(batch.max_num_draft),
        options=tuple(map(frozen, batch.options)),
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
        tuple(frozen(batch.options[row]) for row in rows),
        likeliest=likeliest_at(batch.likeliest, {row: place for place, row in enumerate(rows)}, batch.num_reqs),
    )


def likeliest_at(likeliest: ArgmaxTokens | None, places: Mapping[int, int], num_reqs: int) -> ArgmaxTokens | None:
    """That of those of num_reqs requests which have a place in another batch, in ascending order.

    >>> ids = np.array([7, 8, 9], np.int32)
    >>> likeliest_at(ArgmaxTokens(np.array([0, 1, 2], np.int32), ids, ids), {0: 0, 2: 1}, 3).requests.tolist()
    [0, 1]
    """
    if likeliest is None:
        return None
    place_of = np.full(num_reqs, -1, np.int32)
    place_of[list(places)] = list(places.values())
    requests = place_of[likeliest.requests]
    kept = requests >= 0
    return ArgmaxTokens(*(copy(array[kept]) for array in (requests, likeliest.token_ids, likeliest.next_ids)))


def feedback_for_proposer(feedback: Feedback) -> Feedback:
    """The feedback that a proposer is handed in the place of the engine's own."""
    numbers = copy(feedback.num_draft), copy(feedback.num_accepted)
    return Feedback(tuple(feedback.request_ids), *numbers, feedback.step_ms)


def _views(token_ids: Sequence[Int32Array]) -> Views:
    return token_ids if type(token_ids) is Views else Views(map(view, token_ids))
