"""Prompt lookup: draft what followed the last earlier occurrence of the current n-gram.

A history proposer: it reads token ids only. Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with
Reference" (2023) for the `reference` option.

A client's prompt and reference cost nobody else: they are taken in as fast as leaves a step its time, their indexes
hold no more than `max_index_bytes` together, and a fault in one request's data drops that request's drafts alone.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.proposers.drafted import NO_COUNTS, NO_TOKENS
from vllm_specplugins.proposers.read_only import places_of
from vllm_specplugins.structures.allowance import Allowance
from vllm_specplugins.structures.ngram_index import NgramIndex, Reference
from vllm_specplugins.structures.ngram_rows import SPENT, TAKEN_IN, NgramRows, draft, take_in

logger = logging.getLogger("vllm.specplugins")

# In looks into a table, as all work of an index; no clock, so that all ranks of a tensor-parallel group do the same.
OWN_WORK = 64  # of each request that is no more tokens behind, in each step: a decoding one needs some twenty
SHARED_WORK = 5_000  # of all in a step, for prompts and references: 0.3 ms, 1.1 where caches are cold
FREED_BYTES = 1 << 21  # of tables that are over, in each step, and with each request that ends

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Request:
    """A request's index, the digest of its reference, and its row."""

    index: NgramIndex
    digest: bytes | None
    row: int


@dataclass(slots=True)
class _Shared:
    """A reference, its row, and how many requests search it."""

    reference: Reference
    row: int
    num_users: int = 0


class PromptLookup:
    """Keeps one n-gram index a request; the work of a step does not grow with the length of the history.

    Request option `reference`: token ids that the output is likely to repeat (a predicted output, a retrieved
    document); they are looked up like a part of the prompt, and never shown to the model. Requests with the same one
    share its index. A request is drafted for once all of its tokens are taken in.
    """

    def __init__(self, config: PromptLookupConfig, context: ProposerContext):
        self._config = config
        self._max_num_draft = context.max_num_draft
        self._allowance = Allowance(max_bytes=config.max_index_bytes)
        self._requests: dict[str, _Request] = {}
        self._references: dict[bytes, _Shared] = {}
        self._failed: set[str] = set()
        self._rows = NgramRows()
        self._newest_ids: Sequence[str] | None = None  # the requests that were asked for last, and their rows
        self._newest_rows: Ints = NO_COUNTS
        self._taken_in: Any = None  # the histories of the step that was taken in last, and where they lie
        self._places = NO_COUNTS, NO_COUNTS

    def propose(self, batch: DraftBatch) -> Draft:
        """The continuation of the longest match for each request, the most recent one among equals."""
        wanted = batch.max_num_draft.astype(np.int64)
        token_ids, num_draft, match_lengths = self.continue_drafts(batch, NO_TOKENS, NO_COUNTS, wanted)
        return Draft(token_ids, num_draft.astype(np.int32), confidence=match_lengths.astype(np.float32))

    def continue_drafts(
        self, batch: DraftBatch, begun: Int32Array, num_begun: Ints, wanted: Ints
    ) -> tuple[Int32Array, Ints, npt.NDArray[np.float64]]:
        """What follows each request's history and a draft that was begun, which is not remembered.

        Args:
            begun: [num_reqs, K] int32.
            num_begun: [num_reqs] int64, how many tokens of each were begun; empty: none of any.
            wanted: [num_reqs] int64, how many more there may be.

        Returns tokens [num_reqs, K], their number [num_reqs], and the lengths of the matches [num_reqs].
        """
        if batch.token_ids is not self._taken_in:
            self._take_in(batch)
        num_reqs = batch.num_reqs
        token_ids = np.zeros((num_reqs, self._max_num_draft), np.int32)
        num_draft, match_lengths = np.empty(num_reqs, np.int64), np.empty(num_reqs)
        histories = *self._places, self._rows_of(batch.request_ids)
        draft(*histories, self._rows.table, begun, num_begun, wanted, token_ids, num_draft, match_lengths)
        return token_ids, num_draft, match_lengths

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: the accepted tokens come with the next batch's histories."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the indexes of these requests; what is large is freed over the next steps."""
        self._taken_in = None
        for request_id in request_ids:
            self._drop(request_id)
            self._failed.discard(request_id)
        self._allowance.free(FREED_BYTES)

    def num_bytes(self) -> int:
        """Memory of all indexes, with what is still to be freed."""
        return self._allowance.num_bytes

    def _take_in(self, batch: DraftBatch) -> None:
        """Once a step: each request's new tokens, and of longer texts as much as goes, the shortest rest first; a
        reference is as short as its share for each of its users, or those who come and go would keep it waiting."""
        self._taken_in = batch.token_ids
        self._allowance.free(FREED_BYTES)
        self._places = places_of(batch.token_ids)
        fates = np.empty(batch.num_reqs, np.int64)
        wanted, rows = batch.max_num_draft.astype(np.int64), self._rows_of(batch.request_ids)
        if not take_in(*self._places, wanted, rows, self._rows.table, OWN_WORK, fates):
            return
        self._allowance.work = OWN_WORK * batch.num_reqs
        behind: list[tuple[float, int, int, NgramIndex, Int32Array]] = []
        for row, fate in enumerate(fates.tolist()):
            if fate != TAKEN_IN and batch.request_ids[row] not in self._failed:
                with self._failing(batch.request_ids[row]):
                    behind += self._own_work(batch, row, fate == SPENT)
        self._allowance.work = SHARED_WORK  # what requests did not need of their own is not for others
        for _, row, index_row, index, text in sorted(behind, key=lambda item: item[:2]):
            with self._failing(batch.request_ids[row]):
                self._enter(index_row, index, text)

    def _own_work(
        self, batch: DraftBatch, row: int, is_spent: bool
    ) -> list[tuple[float, int, int, NgramIndex, Int32Array]]:
        """Does for a request what is its own, unless that is spent; what is left: how much, for whom, and of what."""
        request_id, history = batch.request_ids[row], batch.token_ids[row]
        request = self._requests.get(request_id)
        if request is None or not request.index.continues(history):
            request = self._begin(request_id, batch.options[row])
        found: list[tuple[float, int, int, NgramIndex, Int32Array]] = []
        left = request.index.num_left(history)
        waits = left > 0 if is_spent else left > OWN_WORK
        if waits or not self._enter(request.row, request.index, history, OWN_WORK):
            found.append((left, row, request.row, request.index, history))
        if request.digest is not None:
            shared = self._references[request.digest]
            other = shared.reference
            if left := other.index.num_left(other.text):
                found.append((left / shared.num_users, row, shared.row, other.index, other.text))
        return found

    def _enter(self, row: int, index: NgramIndex, text: Int32Array, most: int | None = None) -> bool:
        """See NgramIndex.take_in."""
        try:
            return index.take_in(text, most)
        finally:
            self._rows.update(row, index)

    @contextmanager
    def _failing(self, request_id: str) -> Iterator[None]:
        """What is raised within is this request's fault."""
        try:
            yield
        except Exception as error:
            self._fail(request_id, error)

    def _rows_of(self, request_ids: Sequence[str]) -> Ints:
        """[num_reqs], rows of the requests' indexes, 0 for those that have none."""
        if self._newest_ids != request_ids:
            rows = (self._requests.get(request_id) for request_id in request_ids)
            self._newest_rows = np.array([0 if own is None else own.row for own in rows], np.int64)
            self._newest_ids = request_ids[:]
        return self._newest_rows

    def _begin(self, request_id: str, options: Mapping[str, Any]) -> _Request:
        """A request that is new, or begins anew: its history is not the one that was shown."""
        self._drop(request_id)
        digest = self._shared(options) if options else None
        index = self._index()
        request = self._requests[request_id] = _Request(index, digest, self._rows.add(index))
        if digest is not None:
            self._rows.search(request.row, self._references[digest].row)
        self._newest_ids = None
        return request

    def _shared(self, options: Mapping[str, Any]) -> bytes | None:
        """The digest of a request's reference, which then has one user more; None where there is none."""
        text = np.asarray(options.get("reference", ()), np.int32)
        if len(text) == 0:
            return None
        digest: bytes = options.get("reference_digest") or hashlib.blake2b(text.tobytes(), digest_size=16).digest()
        if digest not in self._references:
            reference = Reference(text, self._index())
            self._references[digest] = _Shared(reference, self._rows.add_reference(reference))
        self._references[digest].num_users += 1
        return digest

    def _index(self) -> NgramIndex:
        return NgramIndex(self._config.min_ngram, self._config.max_ngram, self._allowance)

    def _drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._newest_ids = None
        self._rows.drop(request.row)
        request.index.free()
        if request.digest is not None:
            shared = self._references[request.digest]
            shared.num_users -= 1
            if shared.num_users == 0:
                del self._references[request.digest]
                self._rows.drop(shared.row)
                shared.reference.index.free()

    def _fail(self, request_id: str, error: Exception) -> None:
        """Drafts no more for a request whose data cannot be taken in, until it is forgotten."""
        logger.debug("no drafts for request %s: %s", request_id, error)
        self._failed.add(request_id)
        self._drop(request_id)
