"""Stores the drafts of a batch as arrays, and combines two drafts. The arrays are NumPy arrays on the host, and torch
tensors on the device. The same code handles both; it neither waits for a device nor branches on an array's values. K:
max draft tokens."""

from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.structures.arrays import Array, Ints

MIN_LONGER = 2  # tokens by which a match in an earlier output must be longer than a match in the request's text
FIRST_CONFIDENCE = 1.0  # the confidence of a stage that reports none, or has not drafted yet


class DraftArrays(NamedTuple):
    """A draft for each request of a batch. The tokens past a request's num_draft are arbitrary.

    Args:
        token_ids: [num_reqs, K] int32.
        num_draft: [num_reqs] int; on the host int64.
        stage: [num_reqs, K] int, index of the stage to which a token counts; on the host int64.
        confidence: [num_reqs, K] float, on the host float64. Below 1 it is the drafter's acceptance probability of the
            token, given that the earlier ones are accepted. From 1 on it is the length of the match before the token,
            which grows by one with each token. A stage that reports neither counts 1, 2, 3, ...
        q: [num_reqs, K] int64, the row of `logits` from which the token was drawn, -1 if its q is one-hot. None: all
            are one-hot. On the device q is not used; row and place are the draft's.
        logits: [N, vocab_size] tensor, on the device [num_reqs, at most K, vocab_size].
        by_stage: for each stage of a cascade on the device, the number of tokens that it drafted, [num_reqs] int, -1 if
            it was not called; then, under the policy `verify`, the number of tokens that the model confirmed.
    """

    token_ids: Array
    num_draft: Array
    stage: Array
    confidence: Array
    q: Array | None = None
    logits: Any = None
    by_stage: tuple[Array, ...] = ()

    @property
    def is_drafted(self) -> Array:
        """Returns [num_reqs, K] bool: whether a token belongs to the draft."""
        return columns(self.token_ids) < self.num_draft[:, None]

    def cut(self, num_draft: Array) -> "DraftArrays":
        """Returns the first num_draft [num_reqs] tokens of each draft."""
        return self._replace(num_draft=num_draft)

    def shifted(self, num_tokens: Array) -> "DraftArrays":
        """Returns the tokens from place num_tokens [num_reqs] on; the place may be negative."""
        places = columns(self.token_ids) + num_tokens[:, None]
        q = None if self.q is None else picked(self.q, places)
        token_ids, stage, confidence = (picked(part, places) for part in (self.token_ids, self.stage, self.confidence))
        return self._replace(token_ids=token_ids, stage=stage, confidence=confidence, q=q)


def combine(is_first: Array, first: DraftArrays, second: DraftArrays, num_draft: Array) -> DraftArrays:
    """Returns the tokens of the first draft where is_first, [num_reqs, K or 1] bool, is set, and of the second draft
    elsewhere."""
    where = namespace(is_first).where
    token_ids, stage, confidence = (
        where(is_first, getattr(first, name), getattr(second, name)) for name in ("token_ids", "stage", "confidence")
    )
    combined = DraftArrays(token_ids, num_draft, stage, confidence)
    if first.q is None and second.q is None:
        return combined
    one_hot, rows = namespace(is_first).full_like(stage, -1), second.q
    if rows is not None and first.q is not None:
        rows = where(rows < 0, -1, rows + len(first.logits))
    q = where(is_first, *(one_hot if rows is None else rows for rows in (first.q, rows)))
    return combined._replace(q=q, logits=stacked([part.logits for part in (first, second) if part.q is not None]))


def join(first: DraftArrays, second: DraftArrays) -> DraftArrays:
    """Appends each request's second draft to its first one, up to K tokens."""
    ends = first.num_draft
    return combine(columns(first.token_ids) < ends[:, None], first, second.shifted(-ends), ends + second.num_draft)


def either(is_first: Array, first: DraftArrays, second: DraftArrays) -> DraftArrays:
    """Returns the first draft of the requests with is_first, [num_reqs] bool, and the second draft of the other
    requests."""
    num_draft = namespace(is_first).where(is_first, first.num_draft, second.num_draft)
    return combine(is_first[:, None], first, second, num_draft)


def to_beat(num_draft: Array, match_length: Array) -> Array:
    """Returns the match length [num_reqs] above which a match in an earlier output replaces these drafts from the
    request's text. A match of the same length is accepted less often if it is in another text."""
    return (match_length + MIN_LONGER) * (num_draft > 0)


def better(first: DraftArrays, second: DraftArrays, gains: tuple[Array, Array] | None) -> DraftArrays:
    """Returns, for each request, the draft with the larger gain ([num_reqs] each); without gains, the first draft that
    has a token. If one draft begins with the other, it returns the longer one, and counts its tokens for the second
    stage.

    >>> first, second = (of_stage(i, np.array([[5, 6, 7]]), np.array([3 - i]), np.ones(1)) for i in (0, 1))
    >>> best = better(first, second, None)
    >>> best.num_draft.tolist(), best.stage.tolist()
    ([3], [[1, 1, 0]])
    """
    is_second = second.is_drafted
    agrees = ((first.token_ids == second.token_ids) | ~(is_second & first.is_drafted)).all(1)
    is_first = first.num_draft > 0 if gains is None else gains[0] >= gains[1]
    longer = either(first.num_draft >= second.num_draft, first, second)
    best = either(agrees, longer, either(is_first, first, second))
    where, shared = namespace(agrees).where, agrees[:, None] & is_second
    stage, confidence = (where(shared, getattr(second, name), getattr(best, name)) for name in ("stage", "confidence"))
    return best._replace(stage=stage, confidence=confidence)


def of_stage(
    stage: int,
    token_ids: Array,  # [num_reqs, K] int32
    num_draft: Array,  # [num_reqs] int
    confidence: Array,  # [num_reqs] float, of each first token, or [num_reqs, K]
    q: Array | None = None,  # [num_reqs, K] int64
    logits: Any = None,
) -> DraftArrays:
    if isinstance(token_ids, np.ndarray):
        num_draft, confidence = num_draft.astype(np.int64, copy=False), confidence.astype(np.float64, copy=False)
        stages = np.full(token_ids.shape, stage)
    else:
        stages = namespace(token_ids).full_like(token_ids, stage)
    if confidence.ndim == 1:
        confidence = confidence[:, None] + columns(token_ids)
    return DraftArrays(token_ids, num_draft, stages, confidence, q, logits)


def nothing(num_reqs: int, max_num_draft: int) -> DraftArrays:
    token_ids = np.zeros((num_reqs, max_num_draft), np.int32)
    return of_stage(0, token_ids, np.zeros(num_reqs, np.int64), np.full(num_reqs, FIRST_CONFIDENCE))


def begun(prefix: DraftArrays | None) -> tuple[Array, Ints]:
    """Returns the tokens and lengths of drafts that compiled code continues; both are empty if there are none."""
    return (_NO_TOKENS, NO_COUNTS) if prefix is None else (prefix.token_ids, prefix.num_draft)


_NO_TOKENS, NO_COUNTS = np.empty((0, 0), np.int32), np.empty(0, np.int64)


def namespace(array: Array) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import torch  # a tensor exists, so torch is loaded

    return torch


def up_to(count: int, like: Array) -> Array:
    """Returns 0, 1, ..., count - 1 (int64) on the device of another array."""
    if isinstance(like, np.ndarray):
        return np.arange(count)
    return namespace(like).arange(count, device=like.device)


def columns(array: Array) -> Array:
    """Returns 0, 1, 2, ... (int64), one number per column."""
    return up_to(array.shape[1], array)


def picked(array: Array, places: Array) -> Array:
    """Returns the elements at places [num_rows, K] int64 in each row of an array [num_rows, T]. Places outside of the
    array give arbitrary elements.

    >>> picked(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 0], [2, 3]])).tolist()
    [[2, 1], [6, 1]]
    """
    num_rows, num_columns = array.shape
    places = places + up_to(num_rows, array)[:, None] * num_columns
    if isinstance(array, np.ndarray):
        return array.take(places, mode="wrap")
    return array.take(places % max(1, num_rows * num_columns))


def stacked(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else namespace(parts[0]).cat(parts)


def make_one_hot(logits: Any, token_ids: Any, is_certain: Any) -> Any:
    """Makes q one-hot for deterministic tokens [num_reqs, T], in the logits [num_reqs, T, vocab_size]."""
    places, is_certain = token_ids[..., None].long(), is_certain[..., None]
    logits.masked_fill_(is_certain, float("-inf"))
    return logits.scatter_(2, places, logits.gather(2, places).masked_fill_(is_certain, 0.0))


def put_logits(
    table: Any,  # [num_slots, K, vocab_size], written
    slots: Any,  # [num_reqs] int64
    token_ids: Any,  # [num_reqs, K]
    logits: Any,  # [num_reqs, at most K, vocab_size], changed; None: all tokens are certain
    is_certain: Any,  # [num_reqs, K] bool; None: none of those with logits is
) -> None:
    """Writes the logits from which tokens were sampled to a table, one-hot for deterministic tokens and for drafts
    without logits."""
    num_drawn = 0 if logits is None else logits.shape[1]
    if logits is not None:
        if is_certain is not None:
            make_one_hot(logits, token_ids[:, :num_drawn], is_certain[:, :num_drawn])
        table[slots, :num_drawn] = logits.to(table.dtype)
    if num_drawn < token_ids.shape[1]:
        rest = token_ids[:, num_drawn:, None].long()
        one_hot = table.new_full((*rest.shape[:2], table.shape[-1]), float("-inf"))
        table[slots, num_drawn:] = one_hot.scatter_(2, rest, 0.0)


def dense_logits(drafts: DraftArrays, width: int) -> Any:
    """Returns the logits of the first tokens, [num_reqs, width, vocab_size], one-hot for deterministic tokens;
    None if all are deterministic."""
    if drafts.q is None:
        return None
    import torch

    device = drafts.logits.device
    token_ids, q = (torch.as_tensor(part[:, :width], device=device) for part in (drafts.token_ids, drafts.q))
    return make_one_hot(drafts.logits[q.clamp(0, len(drafts.logits) - 1)], token_ids, q < 0)
