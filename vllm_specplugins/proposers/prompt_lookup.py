"""Prompt lookup: draft what followed an earlier occurrence of the newest tokens.

A history proposer: it reads token ids only. Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with
Reference" (2023) for the `reference` option. Which occurrence, and what its search costs: see kernels/history_match.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer, ProposerContext
from vllm_specplugins.kernels.history_match import NO_MATCH
from vllm_specplugins.kernels.history_match.host import NUM_COLUMNS, NUM_TOKENS, OWN, REFERENCE, history_match
from vllm_specplugins.structures.arrays import NO_COUNTS, NO_TOKENS, SlotTable, places_of, with_room

Ints = npt.NDArray[np.int64]


class Lookup(Proposer):
    """Copies what stands in texts, and continues drafts. It learns nothing: the accepted tokens come with the next
    batch's histories."""

    def propose(self, batch: DraftBatch) -> Draft:
        """What follows each request's history, where there is no draft yet."""
        max_draft = batch.max_num_draft.astype(np.int64)
        token_ids, num_draft, confidence = self.continue_drafts(batch, NO_TOKENS, NO_COUNTS, max_draft)
        return Draft(token_ids, num_draft.astype(np.int32), confidence=confidence.astype(np.float32))

    def continue_drafts(
        self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, max_draft: Ints
    ) -> tuple[Int32Array, Ints, npt.NDArray[np.float64]]:
        """What follows each request's history and a draft that was begun, which is not remembered.

        Args:
            prefix: [num_reqs, K] int32.
            num_begun: [num_reqs] int64, how many tokens of each were begun; empty: none of any.
            max_draft: [num_reqs] int64, how many more there may be.

        Returns tokens [num_reqs, K], their number [num_reqs], and the lengths of the matches [num_reqs].
        """
        raise NotImplementedError


class PromptLookup(Lookup):
    """Of a request it keeps where copying would go on, and its reference; texts are searched in each step.

    Request option `reference`: token ids that the output is likely to repeat (a predicted output, a retrieved
    document); they are searched beside the request's own text, and never shown to the model.
    """

    def __init__(self, config: PromptLookupConfig, context: ProposerContext):
        self._ngrams = config.min_ngram, config.max_ngram
        self._max_num_draft = context.max_num_draft
        self._rows, self._newest_rows = SlotTable(), NO_COUNTS
        self._known = np.zeros((1, NUM_COLUMNS), np.int64)  # a row that is 0 is new
        self._references: dict[int, Int32Array] = {}  # by row

    def continue_drafts(
        self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, max_draft: Ints
    ) -> tuple[Int32Array, Ints, npt.NDArray[np.float64]]:
        """By the longest match, that nearest to where copying would go on."""
        num_reqs = batch.num_reqs
        token_ids = np.zeros((num_reqs, self._max_num_draft), np.int32)
        num_draft, match_lengths = np.zeros(num_reqs, np.int64), np.zeros(num_reqs)
        requests = *places_of(batch.token_ids), self.rows_of(batch), self._known
        history_match(*requests, prefix, num_begun, max_draft, *self._ngrams, token_ids, num_draft, match_lengths)
        return token_ids, num_draft, match_lengths

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        rows = self._rows.forget(request_ids)
        self._known[rows] = 0
        for row in rows.tolist():
            self._references.pop(row, None)

    def num_bytes(self) -> int:
        """Memory of all references."""
        return sum(text.nbytes for text in list(self._references.values()))  # its own thread may change it

    def rows_of(self, batch: DraftBatch) -> Ints:
        """[num_reqs], where what is kept of these requests stands."""
        rows = self._rows.of(batch.request_ids)
        if rows is not self._newest_rows:  # others than in the last step
            self._newest_rows, self._known = rows, with_room(self._known, self._rows.num_rows)
            for index in np.flatnonzero(self._known[rows, OWN] == 0).tolist():
                self._begin(rows.item(index), batch.options[index])
        return rows

    def references_of(self, rows: Ints) -> Ints:
        """[num_reqs * 2], where their references lie, and the lengths of these, or 0."""
        return self._known[rows, REFERENCE : NUM_TOKENS + 1].ravel()

    @property
    def num_rows(self) -> int:
        """Rows are below this."""
        return self._rows.num_rows

    def _begin(self, row: int, options: Mapping[str, Any]) -> None:
        """A request that is new; a reference that is no list of token ids is not searched, and costs nobody else."""
        self._known[row] = NO_MATCH, NO_MATCH, 0, 0
        with suppress(TypeError, ValueError, OverflowError):
            text = np.ascontiguousarray(options.get("reference", ()), np.int32).ravel()
            self._references[row] = text
            self._known[row] = NO_MATCH, NO_MATCH, text.ctypes.data, len(text)
