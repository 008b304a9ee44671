"""A step in arrays: the row that each request has until it is forgotten, where its text lies in memory, and its draft
while it is made: NumPy's on the host, torch's on the device.

It is the same code for both: nothing here waits for a device or branches on what is in an array. Nothing is compiled,
either: the plugin's front end imports this. K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Int32Array

Array = Any  # of NumPy, or a torch.Tensor
NO_TOKENS, NO_COUNTS = np.empty((0, 0), np.int32), np.empty(0, np.int64)  # of drafts that nobody has begun
FIRST_CONFIDENCE = 1.0  # of a stage that says none, or has not drafted yet
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


def namespace(array: Array) -> Any:
    """The module whose functions take such arrays."""
    if isinstance(array, np.ndarray):
        return np
    import torch  # where a tensor is, it is loaded

    return torch


def up_to(count: int, like: Array) -> Array:
    """0 1 2 ... count - 1, int64, on the side of another array."""
    if isinstance(like, np.ndarray):
        return np.arange(count)
    return namespace(like).arange(count, device=like.device)


def columns(array: Array) -> Array:
    """[num_columns] int64: 0 1 2 ..."""
    return up_to(array.shape[1], array)


def picked(array: Array, places: Array) -> Array:
    """Of each row of an array [num_rows, T] the elements at places [num_rows, K] int64; any one where there is none.

    >>> picked(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 0], [2, 3]])).tolist()
    [[2, 1], [6, 1]]
    """
    num_rows, num_columns = array.shape
    places = places + up_to(num_rows, array)[:, None] * num_columns
    if isinstance(array, np.ndarray):
        return array.take(places, mode="wrap")
    return array.take(places % max(1, num_rows * num_columns))


class DraftArrays(NamedTuple):
    """What drafters made for each request of a batch. What stands past a request's num_draft is some token.

    Args:
        token_ids: [num_reqs, K] int32.
        num_draft: [num_reqs] int; on the host int64.
        stage: [num_reqs, K] int, index of the stage that answers for a token; on the host int64.
        confidence: [num_reqs, K] float, on the host float64. Below 1 it is the drafter's acceptance probability of the
            token if those before it are accepted; from 1 on it is the length of the match before the token, which is
            one longer for each next token. A stage that reports neither counts 1, 2, 3, ...
        q: [num_reqs, K] int64, the row of `logits` that the token was drawn from, -1 where its q is one-hot; None: all.
        logits: [N, vocab_size] tensor.
    """

    token_ids: Array
    num_draft: Array
    stage: Array
    confidence: Array
    q: Array | None = None
    logits: Any = None

    @property
    def is_drafted(self) -> Array:
        """[num_reqs, K] bool: whether a token is one of the draft."""
        return columns(self.token_ids) < self.num_draft[:, None]

    def followed_by(self, other: "DraftArrays") -> "DraftArrays":
        """Each request's draft, and after it its other one, as far as K goes."""
        ends = self.num_draft[:, None]
        places = columns(self.token_ids) - ends
        moved = other._replace(
            token_ids=picked(other.token_ids, places),
            stage=picked(other.stage, places),
            confidence=picked(other.confidence, places),
            q=None if other.q is None else picked(other.q, places),
        )
        return _chosen(places < 0, self, moved, self.num_draft + other.num_draft)


def of_stage(
    stage: int,
    token_ids: Array,  # [num_reqs, K] int32
    num_draft: Array,  # [num_reqs] int
    confidence: Array,  # [num_reqs] float, of each first token, or [num_reqs, K]
    q: Array | None = None,  # [num_reqs, K] int64
    logits: Any = None,
) -> DraftArrays:
    """Drafts that one stage made."""
    if isinstance(token_ids, np.ndarray):
        num_draft, confidence = num_draft.astype(np.int64, copy=False), confidence.astype(np.float64, copy=False)
        stages = np.full(token_ids.shape, stage)
    else:
        stages = namespace(token_ids).full_like(token_ids, stage)
    if confidence.ndim == 1:
        confidence = confidence[:, None] + columns(token_ids)
    return DraftArrays(token_ids, num_draft, stages, confidence, q, logits)


def nothing(num_reqs: int, max_num_draft: int) -> DraftArrays:
    """No draft for anybody, on the host."""
    token_ids = np.zeros((num_reqs, max_num_draft), np.int32)
    return of_stage(0, token_ids, np.zeros(num_reqs, np.int64), np.full(num_reqs, FIRST_CONFIDENCE))


def either(is_first: Array, first: DraftArrays, second: DraftArrays) -> DraftArrays:
    """The first draft of the requests [num_reqs] bool that have that one, the second of the others."""
    num_draft = namespace(is_first).where(is_first, first.num_draft, second.num_draft)
    return _chosen(is_first[:, None], first, second, num_draft)


def _chosen(is_first: Array, first: DraftArrays, second: DraftArrays, num_draft: Array) -> DraftArrays:
    where = namespace(is_first).where
    parts = ((getattr(first, name), getattr(second, name)) for name in ("token_ids", "stage", "confidence"))
    token_ids, stage, confidence = (where(is_first, one, other) for one, other in parts)
    if first.q is None and second.q is None:
        return DraftArrays(token_ids, num_draft, stage, confidence)
    one_hot = namespace(is_first).full_like(stage, -1)
    own, other = one_hot if first.q is None else first.q, one_hot if second.q is None else second.q
    if first.q is not None and second.q is not None:
        other = where(other < 0, -1, other + len(first.logits))
    q = where(is_first, own, other)
    all_logits = [logits for logits in (first.logits, second.logits) if logits is not None]
    return DraftArrays(token_ids, num_draft, stage, confidence, q, stacked(all_logits))


def stacked(parts: list[Any]) -> Any:
    """Logits of several passes as one tensor."""
    return parts[0] if len(parts) == 1 else namespace(parts[0]).cat(parts)


def dense_logits(drafts: DraftArrays, max_length: int) -> Any:
    """[num_reqs, max_length, vocab_size] of the first tokens, a tensor; None if all tokens are certain.

    Where some are, theirs are one-hot.
    """
    if drafts.q is None:
        return None
    import torch

    device = drafts.logits.device
    token_ids, q = (
        torch.as_tensor(part[:, :max_length], device=device).long() for part in (drafts.token_ids, drafts.q)
    )
    logits = drafts.logits[q.clamp(0, len(drafts.logits) - 1)]
    is_certain, places = (q < 0)[..., None], token_ids[..., None]
    logits.masked_fill_(is_certain, -torch.inf)
    return logits.scatter_(2, places, logits.gather(2, places).masked_fill_(is_certain, 0.0))
