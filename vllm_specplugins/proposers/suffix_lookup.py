"""Suffix lookup: what most often followed the longest match, in the request's own text and in earlier outputs.

A history proposer: it reads token ids only. Oliaro et al., "SuffixDecoding" (2024). A request's output, with the end of
its prompt, goes into the store of its tenant when the request ends, or is preempted; other tenants' outputs are never
looked at. All that is long is taken in by pieces, by work and not by the clock.
"""

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import SuffixLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.structures.suffix.drafts import Asked, Drafts
from vllm_specplugins.structures.suffix.pages import PAGE
from vllm_specplugins.structures.suffix.requests import SuffixRequests
from vllm_specplugins.structures.suffix.search import LONGEST_MATCH
from vllm_specplugins.structures.suffix.store import SuffixStore
from vllm_specplugins.structures.suffix.store_file import StoredText, StoreFile, fingerprint
from vllm_specplugins.structures.suffix.store_saver import StoreSaver

logger = logging.getLogger("vllm.specplugins")

# In looks into a table; no clock, so that all ranks of a tensor-parallel group do the same.
SHARED_WORK = 8_000  # of all requests in a step, for prompts and references
STORE_WORK = 2_000  # of a step, for outputs that enter the store, and what makes room for them
MAX_NEW = 64  # tokens that a request takes in at once beside that
NOTHING = np.empty(0, np.int32)
Ints = npt.NDArray[np.int64]
NUM_PROMPT_TOKENS = 8  # the last of a prompt, which go into the store with the output: it begins somewhere
OUTPUT_SHARE = 16  # one part in so many of the store's memory, on top of it, is for outputs that are not finished


@dataclass(slots=True)
class _Request:
    """What is kept of a request beside its row: tokens of its history that were seen, whose store it looks at, whether
    its output is kept to go there, and the digest of its reference."""

    row: int
    num_seen: int
    tenant: bytes
    learns: bool
    digest: bytes | None = None
    output: "array[int]" = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class _Reference:
    """A text that requests search beside their own, its row, and how many requests that are."""

    text: Int32Array
    row: int
    num_users: int = 0


class SuffixLookup:
    """See the module.

    Request options: `reference`, as prompt lookup's; `learn`, whether the output goes into the store; `tenant`, bytes,
    whose store that is (the engine derives it from the request's `cache_salt`).
    """

    def __init__(self, config: SuffixLookupConfig, context: ProposerContext):
        self._min_confidence, self._max_num_draft = float(config.min_confidence), context.max_num_draft
        self.store = SuffixStore(config.store_bytes)
        self._table = SuffixRequests(config.max_index_bytes, context.max_num_reqs, context.max_num_draft)
        self._max_output_bytes = config.store_bytes // OUTPUT_SHARE
        self._output_bytes = 0
        self._saver: StoreSaver | None = None
        if config.store_path is not None:
            self._load(config, context)
        self._requests: dict[str, _Request] = {}
        self._references: dict[bytes, _Reference] = {}
        self._behind: set[str] = set()  # requests whose text or reference is not whole yet
        self._taken_in: Any = None  # the histories of the step that was taken in last

    def _load(self, config: SuffixLookupConfig, context: ProposerContext) -> None:
        """Enters the texts of this engine's file, on every rank those that rank 0 has read, which alone saves."""
        texts: list[StoredText] = []
        if context.file_suffix is not None:
            path, mark = (
                Path(f"{config.store_path}{context.file_suffix}"),
                fingerprint(context.tokenize, context.vocab_size),
            )
            file = StoreFile(path, mark, context.vocab_size, self.store.num_bytes)
            self._saver = StoreSaver(self.store, file, config.save_every_s)
            texts = self._saver.writer.load()
            logger.info("suffix_lookup: %d texts loaded from %s.", len(texts), path)
        for in_use, tenant, text in context.agreed(texts):
            self.store.enter(tenant, text, in_use)
            self.store.work()

    def propose(self, batch: DraftBatch) -> Draft:
        """For each request the draft with the most confidence, of those from its own text and from earlier outputs."""
        drafts = self._take_in(batch, batch.max_num_draft)
        return Draft(drafts.tokens, drafts.num_draft, confidence=drafts.match_lengths)

    def continue_drafts(
        self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, max_draft: Ints
    ) -> tuple[Int32Array, Ints, npt.NDArray[np.float64]]:
        """What follows each request's history and a draft that was begun. See PromptLookup."""
        is_new = batch.token_ids is not self._taken_in
        if is_new and not num_begun.any():
            found = self._take_in(batch, max_draft.astype(np.int32))
            return found.tokens, found.num_draft.astype(np.int64), found.match_lengths.astype(np.float64)
        if is_new:
            self._take_in(batch, np.zeros(batch.num_reqs, np.int32))
        token_ids = np.zeros((batch.num_reqs, self._max_num_draft), np.int32)
        num_draft, match_lengths = np.zeros(batch.num_reqs, np.int64), np.zeros(batch.num_reqs)
        counts = num_begun if len(num_begun) else np.zeros_like(max_draft)
        for count in np.unique(counts[max_draft > 0]).tolist():
            rows = np.flatnonzero((max_draft > 0) & (counts == count))
            behind = self._behind_drafts(batch, rows, prefix[:, :count], max_draft)
            token_ids[rows], num_draft[rows], match_lengths[rows] = (
                behind.tokens,
                behind.num_draft,
                behind.match_lengths,
            )
        return token_ids, num_draft, match_lengths

    def _behind_drafts(self, batch: DraftBatch, rows: Ints, prefix: Int32Array, max_draft: Ints) -> Drafts:
        """What follows the drafts of these requests, of as many tokens each."""
        pieces: list[Int32Array] = []
        numbers = array("q")
        for row in rows.tolist():
            history = batch.token_ids[row]
            ending = history[-LONGEST_MATCH:]
            pieces += (ending, prefix[row]) if prefix.size else (ending,)
            size = len(ending) + prefix.shape[1]
            own_row = self._requests[batch.request_ids[row]].row
            numbers.extend((own_row, size, 0, len(history), int(max_draft[row])))
        flat, asked_rows = np.concatenate(pieces), np.frombuffer(numbers, np.int64)
        drafts, _ = self._table.step(Asked(flat, asked_rows, prefix.shape[1], self._min_confidence), self.store.texts)
        return drafts

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: what came of the drafts shows in the next batch's histories."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the texts of these requests, and has their outputs enter the store, in this order."""
        self._taken_in = None
        for request_id in request_ids:
            self._finish(request_id)
        self._tidy()

    def num_bytes(self) -> int:
        """Memory of all texts, of the store and of outputs."""
        return self._table.num_bytes + self.store.num_bytes + self._output_bytes

    def store_stats(self) -> dict[str, int]:
        """What the store holds, and what became of texts and saves so far."""
        store, saver = self.store, self._saver
        return {
            "texts": store.num_texts,
            "tokens": store.texts.num_tokens,
            "max_tokens": store.texts.num_pages * PAGE,
            "tenants": store.num_tenants,
            "bytes": store.num_bytes,
            "removed": store.num_removed,
            "refused": store.num_refused,
            "saves": 0 if saver is None else saver.writer.num_saves,
            "failed_saves": 0 if saver is None else saver.writer.num_failures,
        }

    def reset_store(self) -> None:
        """Forgets all earlier outputs, of all tenants, in the file, too, and how often drafts were right."""
        self.store.clear()
        self._table.forget_chances()
        self.save_store()
        self._table.search_store([request.row for request in self._requests.values()], 0)

    def save_store(self) -> None:
        """Saves the store at once, if it has a file."""
        if self._saver is not None:
            self._saver.save()

    def close(self) -> None:
        """Has the outputs of all requests enter the store, and saves that for the last time."""
        for request_id in list(self._requests):
            self._finish(request_id)
        if self._saver is not None:
            self._saver.close()

    def _take_in(self, batch: DraftBatch, max_draft: Int32Array) -> Drafts:
        """Enters each request's new tokens and drafts so many. Of longer texts as much is entered as goes; and the
        store gets on with its work."""
        self._taken_in = batch.token_ids
        pieces: list[Int32Array] = []
        rows = array("q")
        for request_id, history, options, limit in zip(
            batch.request_ids, batch.token_ids, batch.options, max_draft.tolist(), strict=True
        ):
            request, num_tokens = self._requests.get(request_id), len(history)
            if request is None or not 0 <= num_tokens - request.num_seen <= MAX_NEW:
                request = self._begin(request_id, history, options)
            num_seen = request.num_seen
            piece = history[num_seen - LONGEST_MATCH if num_seen > LONGEST_MATCH else 0 :]
            pieces.append(piece)
            rows.extend((request.row, len(piece), num_tokens - num_seen, num_tokens, limit))
            if request.learns and num_seen < num_tokens:
                self._keep(request, history[num_seen:])
            request.num_seen = num_tokens
        if self._behind:
            self._catch_up(batch)
        self._tidy()
        flat = np.concatenate(pieces or [NOTHING])
        asked = Asked(flat, np.frombuffer(rows, np.int64), 0, self._min_confidence)
        drafts, num_cut_off = self._table.step(asked, self.store.texts)
        if num_cut_off:
            self._behind.update(
                name for name in batch.request_ids if not self._table.is_whole(self._requests[name].row)
            )
        return drafts

    def _begin(self, request_id: str, history: Int32Array, options: Mapping[str, Any]) -> _Request:
        """A request that is new, or whose text is another one."""
        self._finish(request_id)
        tenant = options.get("tenant")
        tenant = tenant if isinstance(tenant, bytes) else b""
        request = _Request(self._table.add(), len(history), tenant, options.get("learn", True) is True)
        self._table.search_store(request.row, self.store.ask(request.tenant))
        self._requests[request_id] = request
        self._behind.add(request_id)
        if request.learns:  # one token of it is output
            self._keep(request, history[-1 - NUM_PROMPT_TOKENS :])
        text = np.asarray(options.get("reference", ()), np.int32)
        if len(text):
            digest = options.get("reference_digest") or hashlib.blake2b(text.tobytes(), digest_size=16).digest()
            reference = self._references.get(digest)
            if reference is None:
                reference = self._references[digest] = _Reference(text, self._table.add())
            reference.num_users += 1
            request.digest = digest
            self._table.search(request.row, reference.row)
        return request

    def _keep(self, request: _Request, new: Int32Array) -> None:
        """Keeps what is new of a request's output, as long as there is room."""
        if self._output_bytes + new.nbytes > self._max_output_bytes:
            request.learns = False
            return
        request.output.frombytes(new.tobytes())
        self._output_bytes += new.nbytes

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._behind.discard(request_id)
        self._table.drop(request.row)
        if request.digest is not None:
            reference = self._references[request.digest]
            reference.num_users -= 1
            if reference.num_users == 0:
                self._table.drop(self._references.pop(request.digest).row)
        self._output_bytes -= 4 * len(request.output)
        if request.output:
            text = np.frombuffer(request.output, np.int32)
            if self.store.enter(request.tenant, text) and self._saver is not None:
                self._saver.add(StoredText(self.store.is_back(request.tenant), request.tenant, text))

    def _catch_up(self, batch: DraftBatch) -> None:
        """Enters texts that are behind, the shortest rest first; a reference is as short as its share for each of its
        users, or those who come and go would keep it waiting."""
        waiting: list[tuple[float, int, int, Int32Array]] = []
        for index, (request_id, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            if request_id not in self._behind:
                continue
            request = self._requests[request_id]
            texts = [] if self._table.is_whole(request.row) else [(request.row, history, 1)]
            if request.digest is not None:
                other = self._references[request.digest]
                if not self._table.is_whole(other.row):
                    texts.append((other.row, other.text, other.num_users))
            waiting += [(self._table.num_left(row, text) / users, index, row, text) for row, text, users in texts]
            if not texts:
                self._behind.discard(request_id)
        work = SHARED_WORK
        for _, _, row, text in sorted(waiting, key=lambda item: item[:2]):
            if work > 0:
                work = self._table.enter(row, text, work)

    def _tidy(self) -> None:
        """Goes on with what the store has to do."""
        if self.store.has_work:
            self.store.work(STORE_WORK)
            numbers = [self.store.number(request.tenant) for request in self._requests.values()]
            self._table.search_store([request.row for request in self._requests.values()], numbers)
        if self._saver is not None:
            self._saver.step()
