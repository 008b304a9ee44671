"""Prompt lookup: draft what followed the last earlier occurrence of the current n-gram.

A history proposer: it reads token ids only. Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with
Reference" (2023) for the `reference` option.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.structures.ngram_index import NgramIndex


class PromptLookup:
    """Keeps one n-gram index a request; the work of a step does not grow with the length of the history.

    Request option `reference`: token ids or text that the output is likely to repeat (a predicted output, a
    retrieved document); it is looked up like a part of the prompt, and is never shown to the model.
    """

    def __init__(self, config: PromptLookupConfig, context: ProposerContext):
        self._config = config
        self._context = context
        self._indexes: dict[str, NgramIndex] = {}
        self._start({}).step(np.arange(8, dtype=np.int32), 1)  # compiles, or loads the compiled code

    def propose(self, batch: DraftBatch) -> Draft:
        """The continuation of the longest match for each request, the most recent one among equals."""
        token_ids = np.zeros((batch.num_reqs, self._context.max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        match_length = np.zeros(batch.num_reqs, np.float32)
        for row in range(batch.num_reqs):
            index, history = self._index(batch, row), batch.token_ids[row]
            tokens, match_length[row] = index.step(history[index.num_tokens :], int(batch.max_num_draft[row]))
            num_draft[row] = len(tokens)
            token_ids[row, : len(tokens)] = tokens
        return Draft(token_ids, num_draft, confidence=match_length)

    def continue_draft(
        self, batch: DraftBatch, row: int, begun: Sequence[int], max_tokens: int
    ) -> tuple[Int32Array, int]:
        """Up to max_tokens tokens to follow one request's history and a draft that was begun, which is not
        remembered; and the length of the match."""
        index, history = self._index(batch, row), batch.token_ids[row]
        if index.num_tokens < len(history):
            index.extend(history[index.num_tokens :])
        return index.peek(begun, max_tokens)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: the accepted tokens come with the next batch's histories."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Frees the indexes of these requests."""
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def num_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(index.num_bytes for index in list(self._indexes.values()))  # it may be asked from another thread

    def _index(self, batch: DraftBatch, row: int) -> NgramIndex:
        """The index of a request, begun anew where the history is not the one that it holds."""
        request_id = batch.request_ids[row]
        index = self._indexes.get(request_id)
        if index is None or not _continues(index, batch.token_ids[row]):
            index = self._indexes[request_id] = self._start(batch.options[row])
        return index

    def _start(self, options: Mapping[str, Any]) -> NgramIndex:
        return NgramIndex(self._config.min_ngram, self._config.max_ngram, options.get("reference"))


def _continues(index: NgramIndex, history: Int32Array) -> bool:
    """Whether the history still begins with what the index holds, judged by its length and last token."""
    held = index.num_tokens
    return held == 0 or (held <= len(history) and index.last_token == history[held - 1])
