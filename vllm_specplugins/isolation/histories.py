"""Copies the arrays of a batch to memory of one proposer. A class of another package may write to them, since torch,
`ufunc.at` and the array interface ignore NumPy's read-only flag."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_specplugins.draft import DraftBatch, Int32Array
from vllm_specplugins.isolation.exchange import frozen
from vllm_specplugins.structures.arrays import Views, view


class Histories:
    """Copies of the tokens and options of requests; each step adds the newest tokens."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Int32Array, int]] = {}  # an array with free space, and the number of tokens
        self._options: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}  # the engine's, and the copy

    def batch(self, batch: DraftBatch, rows: Sequence[int]) -> DraftBatch:
        """Returns the batch with copies for these rows; the others are empty."""
        token_ids: list[Int32Array] = [np.empty(0, np.int32)] * batch.num_reqs
        options: list[Mapping[str, Any]] = [{}] * batch.num_reqs
        for row in rows:
            token_ids[row] = self._text(batch.request_ids[row], batch.token_ids[row])
            options[row] = self._copied(batch.request_ids[row], batch.options[row])
        return replace(batch, token_ids=Views(token_ids), options=options)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)
            self._options.pop(request_id, None)

    def _text(self, request_id: str, token_ids: Int32Array) -> Int32Array:
        text, num_copied = self._texts.get(request_id, (token_ids[:0], 0))
        num_tokens = len(token_ids)
        if num_tokens > len(text):
            text, num_copied = np.empty(2 * num_tokens, np.int32), 0
        if not np.array_equal(text[:num_copied], token_ids[:num_copied]):
            num_copied = 0  # the engine removed tokens, or the proposer wrote to the copy
        text[num_copied:num_tokens] = token_ids[num_copied:]
        self._texts[request_id] = text, num_tokens
        return view(text)[:num_tokens]

    def _copied(self, request_id: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        given, copied = self._options.get(request_id, (None, options))
        if given is not options:
            copied = frozen(dict(options))
            self._options[request_id] = options, copied
        return copied
