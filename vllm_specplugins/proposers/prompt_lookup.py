"""Prompt lookup: draft what followed the last earlier occurrence of the current n-gram.

A history proposer: it reads token ids only. Saxena, "Prompt Lookup Decoding" (2023); Yang et al., "Inference with
Reference" (2023) for the `reference` option.

A client's prompt and reference cost nobody else: they are taken in as fast as leaves a step its time, their indexes
hold no more than `max_index_bytes` together, and a fault in one request's data drops that request's drafts alone.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.structures.allowance import Allowance
from vllm_specplugins.structures.ngram_index import NgramIndex, Reference

logger = logging.getLogger("vllm.specplugins")

# In looks into a table, as all work of an index; no clock, so that all ranks of a tensor-parallel group do the same.
OWN_WORK = 64  # of each request that is no more tokens behind, in each step: a decoding one needs some twenty
SHARED_WORK = 5_000  # of all in a step, for prompts and references: 0.3 ms, 1.1 where caches are cold
FREED_BYTES = 1 << 21  # of tables that are over, in each step, and with each request that ends
NOTHING: tuple[Int32Array, int] = np.empty(0, np.int32), 0


@dataclass(slots=True)
class _Request:
    """A request's index, and the digest of its reference."""

    index: NgramIndex
    digest: bytes | None


@dataclass(slots=True)
class _Shared:
    """A reference and how many requests search it."""

    reference: Reference
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
        self._taken_in: Any = None  # the histories of the step that was taken in last

    def propose(self, batch: DraftBatch) -> Draft:
        """The continuation of the longest match for each request, the most recent one among equals."""
        token_ids = np.zeros((batch.num_reqs, self._max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        match_length = np.zeros(batch.num_reqs, np.float32)
        self._take_in(batch)
        for row, limit in enumerate(batch.max_num_draft.tolist()):
            tokens, match_length[row] = self._look_up(batch, row, (), limit, token_ids[row])
            num_draft[row] = len(tokens)
        return Draft(token_ids, num_draft, confidence=match_length)

    def continue_draft(
        self, batch: DraftBatch, row: int, begun: Sequence[int], max_tokens: int
    ) -> tuple[Int32Array, int]:
        """Up to max_tokens tokens to follow one request's history and a draft that was begun, which is not
        remembered; and the length of the match."""
        self._take_in(batch)
        return self._look_up(batch, row, begun, max_tokens, None)

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
        if batch.token_ids is self._taken_in:
            return
        self._taken_in = batch.token_ids
        self._allowance.free(FREED_BYTES)
        self._allowance.work = OWN_WORK * batch.num_reqs
        behind: list[tuple[float, int, NgramIndex, Int32Array]] = []
        rows = zip(batch.request_ids, batch.token_ids, batch.options, batch.max_num_draft.tolist(), strict=True)
        for row, (request_id, history, options, limit) in enumerate(rows):
            if limit == 0 or request_id in self._failed:
                continue
            try:
                request = self._requests.get(request_id)
                if request is None or not request.index.continues(history):
                    request = self._begin(request_id, options)
                left = request.index.num_left(history)
                if left > OWN_WORK or not request.index.take_in(history, OWN_WORK):
                    behind.append((left, row, request.index, history))
                if request.digest is not None:
                    shared = self._references[request.digest]
                    other = shared.reference
                    if left := other.index.num_left(other.text):
                        behind.append((left / shared.num_users, row, other.index, other.text))
            except Exception as error:
                self._fail(request_id, error)
        self._allowance.work = SHARED_WORK  # what requests did not need of their own is not for others
        for _, row, index, text in sorted(behind, key=lambda item: item[:2]):
            try:
                index.take_in(text)
            except Exception as error:
                self._fail(batch.request_ids[row], error)

    def _look_up(
        self, batch: DraftBatch, row: int, begun: Sequence[int], max_tokens: int, out: Int32Array | None
    ) -> tuple[Int32Array, int]:
        request, history = self._requests.get(batch.request_ids[row]), batch.token_ids[row]
        if request is None or max_tokens == 0 or request.index.num_left(history):
            return NOTHING
        other = None
        if request.digest is not None:
            other = self._references[request.digest].reference
            if other.index.num_left(other.text):
                return NOTHING
        return request.index.draft(history, max_tokens, out, begun, other)

    def _begin(self, request_id: str, options: Mapping[str, Any]) -> _Request:
        """A request that is new, or begins anew: its history is not the one that was shown."""
        self._drop(request_id)
        digest = self._shared(options) if options else None
        request = self._requests[request_id] = _Request(self._index(), digest)
        return request

    def _shared(self, options: Mapping[str, Any]) -> bytes | None:
        """The digest of a request's reference, which then has one user more; None where there is none."""
        text = np.asarray(options.get("reference", ()), np.int32)
        if len(text) == 0:
            return None
        digest: bytes = options.get("reference_digest") or hashlib.blake2b(text.tobytes(), digest_size=16).digest()
        if digest not in self._references:
            self._references[digest] = _Shared(Reference(text, self._index()))
        self._references[digest].num_users += 1
        return digest

    def _index(self) -> NgramIndex:
        return NgramIndex(self._config.min_ngram, self._config.max_ngram, self._allowance)

    def _drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.index.free()
        if request.digest is not None:
            shared = self._references[request.digest]
            shared.num_users -= 1
            if shared.num_users == 0:
                self._references.pop(request.digest).reference.index.free()

    def _fail(self, request_id: str, error: Exception) -> None:
        """Drafts no more for a request whose data cannot be taken in, until it is forgotten."""
        logger.debug("no drafts for request %s: %s", request_id, error)
        self._failed.add(request_id)
        self._drop(request_id)
