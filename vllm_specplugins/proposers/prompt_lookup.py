"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the newest ones, from token ids only (Saxena,
"Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", 2023, for the `reference` option).
kernels/history_match documents the choice among occurrences and the cost of a search."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, ProposerContext
from vllm_specplugins.kernels.history_match import NO_MATCH
from vllm_specplugins.kernels.history_match.host import NUM_COLUMNS, TEXT, history_match
from vllm_specplugins.stage import Series, StageProposer
from vllm_specplugins.structures.arrays import SlotTable, places_of, with_room
from vllm_specplugins.structures.drafts import NO_COUNTS, DraftArrays, begun, of_stage

Ints = npt.NDArray[np.int64]


class Lookup(StageProposer):
    """Copies tokens from texts and continues drafts. It needs no feedback, since the next histories contain the
    accepted tokens."""

    def propose(self, batch: DraftBatch) -> Draft:
        drafts = self.draft(batch, None, batch.max_num_draft.astype(np.int64))
        confidence = drafts.confidence[:, 0].astype(np.float32)
        return Draft(drafts.token_ids, drafts.num_draft.astype(np.int32), confidence=confidence)

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts at most limits [num_reqs] int64 tokens after each history and prefix; the prefix is not stored."""
        raise NotImplementedError


class PromptLookup(Lookup):
    """Searches texts in each step. For each request it stores the reference and the copy position. The request option
    `reference` holds token ids that the output is likely to repeat (a predicted output, a retrieved document). The
    lookup searches them in addition to the request's text; the model never sees them.
    """

    def __init__(self, config: PromptLookupConfig, context: ProposerContext):
        self._ngrams = config.min_ngram, config.max_ngram
        self._max_num_draft = context.max_num_draft
        self._rows, self._newest_rows = SlotTable(), NO_COUNTS
        self._known = np.zeros((1, NUM_COLUMNS), np.int64)  # a row of zeros is new
        self._references: dict[int, Int32Array] = {}  # by row

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts by the longest match; of equal matches, the one nearest to the copy position."""
        num_reqs = batch.num_reqs
        token_ids = np.zeros((num_reqs, self._max_num_draft), np.int32)
        num_draft, match_lengths = np.zeros(num_reqs, np.int64), np.zeros(num_reqs)
        requests = *places_of(batch.token_ids), self.rows_of(batch), self._known
        history_match(*requests, *begun(prefix), limits, *self._ngrams, token_ids, num_draft, match_lengths)
        return of_stage(0, token_ids, num_draft, match_lengths)

    def forget(self, request_ids: Sequence[str]) -> None:
        rows = self._rows.forget(request_ids)
        self._known[rows] = 0
        for row in rows.tolist():
            self._references.pop(row, None)

    def num_bytes(self) -> int:
        return sum(text.nbytes for text in list(self._references.values()))  # the proposer's thread may change it

    def series(self) -> Iterator[Series]:
        yield "store_bytes", (), self.num_bytes()

    def rows_of(self, batch: DraftBatch) -> Ints:
        """Returns the rows of these requests, [num_reqs]."""
        rows = self._rows.of(batch.request_ids)
        if rows is not self._newest_rows:  # the requests differ from the last step
            self._newest_rows, self._known = rows, with_room(self._known, self._rows.num_rows)
            for index in np.flatnonzero(self._known[rows, TEXT] == 0).tolist():
                self._begin(rows.item(index), batch.options[index])
        return rows

    def _begin(self, row: int, options: Mapping[str, Any]) -> None:
        """Starts a new request, and ignores a reference that is no list of token ids."""
        self._known[row] = NO_MATCH, NO_MATCH, 0, 0
        with suppress(TypeError, ValueError, OverflowError):
            text = np.ascontiguousarray(options.get("reference", ()), np.int32).ravel()
            self._references[row] = text
            self._known[row] = NO_MATCH, NO_MATCH, text.ctypes.data, len(text)
