"""Gives a proposer read-only copies of the engine's data, and checks and copies its drafts.

Types are compared exactly, so no code of the proposer runs here. Nothing stops code that searches the process for a
buffer's owner (`array.base.obj`, `gc`, `ctypes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Proposer
from vllm_specplugins.structures.arrays import Ints, Views, view

_IMMUTABLE = frozenset({int, float, bool, str, bytes, type(None)})


def copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a read-only copy of a small one-dimensional array."""
    return np.frombuffer(array.tobytes(), array.dtype)


def frozen(value: Any) -> Any:
    """Returns a read-only copy of a client's value: lists become tuples, and dictionaries and arrays become read-only.

    >>> frozen({"a": [1, {"b": 2}]})
    mappingproxy({'a': (1, mappingproxy({'b': 2}))})
    """
    match value:
        case MappingProxyType():
            return value  # frozen before
        case Mapping():
            return MappingProxyType({key: frozen(item) for key, item in value.items()})
        case list() | tuple():
            if _IMMUTABLE.issuperset(map(type, value)):  # fast for a long list of ids
                return tuple(value)
            return tuple(map(frozen, value))
        case np.ndarray():
            return view(np.array(value))
    return value


def for_proposer(batch: DraftBatch) -> DraftBatch:
    return replace(
        batch,
        request_ids=tuple(batch.request_ids),
        token_ids=_views(batch.token_ids),
        max_num_draft=copy(batch.max_num_draft),
        options=tuple(map(frozen, batch.options)),
    )


def rows_of(batch: DraftBatch, rows: Sequence[int], max_num_draft: Int32Array) -> DraftBatch:
    """Returns some requests of a batch for a proposer on the host, without target and offer."""
    token_ids = _views(batch.token_ids)
    return DraftBatch(
        tuple(batch.request_ids[row] for row in rows),
        Views(token_ids[row] for row in rows),
        copy(max_num_draft),
        tuple(frozen(batch.options[row]) for row in rows),
        prompt_lengths=tuple(batch.prompt_lengths[row] for row in rows) if batch.prompt_lengths else (),
    )


def feedback_for_proposer(feedback: Feedback) -> Feedback:
    numbers = copy(feedback.num_draft), copy(feedback.num_accepted)
    refused = None if feedback.num_refused is None else copy(feedback.num_refused)
    shown = replace(feedback, request_ids=tuple(feedback.request_ids), num_draft=numbers[0], num_accepted=numbers[1])
    return replace(shown, num_refused=refused)


def _views(token_ids: Sequence[Int32Array]) -> Views:
    return token_ids if type(token_ids) is Views else Views(map(view, token_ids))


def draft_of_rows(
    proposer: Proposer,
    batch: DraftBatch,
    rows: Ints,
    limits: Int32Array,  # [num_reqs], at most these many tokens
    max_num_draft: int,
    vocab_size: int,
) -> Draft:
    """Returns the checked draft of a proposer on the host for some rows of a batch. Raises Nonsense."""
    limits = limits[rows]
    draft = checked_draft(proposer.propose(rows_of(batch, rows.tolist(), limits)), limits, max_num_draft, vocab_size)
    return spread(draft, rows, batch.num_reqs, max_num_draft)


def spread(draft: Draft, rows: Any, num_reqs: int, width: int) -> Draft:
    """Expands a draft of some rows, without logits, to all `num_reqs` requests."""
    token_ids, num_draft = np.zeros((num_reqs, width), np.int32), np.zeros(num_reqs, np.int32)
    token_ids[rows, : draft.token_ids.shape[1]], num_draft[rows] = draft.token_ids, draft.num_draft
    if draft.confidence is None:
        return Draft(token_ids, num_draft)
    confidence = np.zeros(num_reqs, np.float32)
    confidence[rows] = draft.confidence
    return Draft(token_ids, num_draft, confidence)


class Nonsense(Exception):
    """The proposer returned an invalid draft; the message says why."""


class NotFinite(Nonsense):
    """`num_tokens` tokens were sampled from logits that form no distribution."""

    def __init__(self, num_tokens: int):
        super().__init__("its logits have NaN or infinity, or allow no token")
        self.num_tokens = num_tokens


def checked_draft(
    draft: Any,
    limits: Int32Array,  # [num_reqs], at most these many tokens
    max_num_draft: int,
    vocab_size: int,
    runs_target: bool = False,
) -> Draft:
    """Returns a copy of the draft after checking types, shapes and values; `draft` may be anything. A proposer that
    runs the target is a class of this package. Its tensors are not read, since reading them would wait for the device.

    Raises:
        Nonsense: a field differs from draft.Draft in type, dtype or shape, or has a value out of range.
    """
    if type(draft) is not Draft:
        raise Nonsense(f"it is a {type(draft).__name__}, expected a Draft")
    num_reqs = len(limits)
    fields: list[Any] = [getattr(draft, name, None) for name in Draft.__slots__]
    token_ids, num_draft, confidence, logits = fields
    if not runs_target or type(token_ids) is np.ndarray:
        token_ids = _copied("token_ids", token_ids, np.int32, 2, num_reqs, max_num_draft)
    num_draft = _copied("num_draft", num_draft, np.int32, 1, num_reqs)
    if (num_draft.view(np.uint32) > np.minimum(limits, token_ids.shape[1])).any():  # unsigned, -1 is too large
        raise Nonsense("num_draft is not between 0 and max_num_draft")
    if type(token_ids) is np.ndarray and token_ids.view(np.uint32).max(initial=0) >= vocab_size:
        # columns past the end of a draft may hold anything
        used = token_ids[_used(num_draft, token_ids.shape[1])]
        if used.size and not 0 <= used.min() <= used.max() < vocab_size:
            raise Nonsense(f"a token id is not between 0 and {vocab_size - 1}")
    if confidence is not None:
        confidence = _copied("confidence", confidence, np.float32, 1, num_reqs)
        if not np.isfinite(confidence).all():
            raise Nonsense("confidence is not finite")
    if logits is not None:
        if not runs_target:
            raise Nonsense("it has logits, which only a proposer that runs the target may return")
        # On a GPU no step waits for this check: verification rejects such drafts, and the device counts them.
        if not logits.is_cuda:
            is_broken = ~logits.amax(-1).isfinite().numpy() & _used(num_draft, logits.shape[1])
            if is_broken.any():
                raise NotFinite(int(is_broken.sum()))
    return Draft(token_ids, num_draft, confidence, logits)


def _used(num_draft: Int32Array, width: int) -> npt.NDArray[np.bool_]:
    return np.arange(width) < num_draft[:, None]


def _copied(name: str, value: Any, dtype: Any, ndim: int, num_rows: int, width: int = 0) -> npt.NDArray[Any]:
    """Copies an array of `num_rows` rows and at most `width` columns."""
    if type(value) is not np.ndarray:
        raise Nonsense(f"{name} is a {type(value).__name__}, expected a NumPy array")
    if value.dtype != dtype:
        raise Nonsense(f"{name} is {value.dtype}, expected {np.dtype(dtype)}")
    shape = value.shape
    if len(shape) != ndim or shape[0] != num_rows:
        raise Nonsense(f"{name} has shape {shape}, expected {num_rows} rows and {ndim} dimensions")
    if ndim == 2 and shape[1] > width:
        raise Nonsense(f"{name} has {shape[1]} columns, expected at most {width}")
    return np.array(value, dtype)
