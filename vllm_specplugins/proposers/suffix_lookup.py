"""Suffix lookup: prompt lookup, and the most frequent continuation of the longest match in earlier outputs.

Oliaro et al., "SuffixDecoding" (2024). A request's output, with the end of its prompt, enters the store of its tenant
when the request ends or is preempted; a lookup never searches other tenants' outputs. Each step enters texts up to an
amount of work, not of time, so all ranks do the same. Compiled code releases the GIL, so a reset waits for a call that
the engine has abandoned; the work of that call is bounded.
"""

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import ConfigError, PromptLookupConfig, SuffixLookupConfig, redis_url
from vllm_specplugins.draft import DraftBatch, Int32Array, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import Lookup, PromptLookup
from vllm_specplugins.stage import Series
from vllm_specplugins.structures.arrays import places_of
from vllm_specplugins.structures.drafts import DraftArrays, begun, either, nothing, of_stage, to_beat
from vllm_specplugins.structures.suffix.drafts import draft_step
from vllm_specplugins.structures.suffix.shared import SharedTexts
from vllm_specplugins.structures.suffix.store import SuffixStore
from vllm_specplugins.structures.suffix.store_file import TOKEN_BYTES, StoredText, StoreFile, fingerprint
from vllm_specplugins.structures.suffix.store_saver import StoreSaver

logger = logging.getLogger("vllm.specplugins")

STORE_WORK = 2_000  # table accesses per step, for outputs that enter the store
SHARED_WORK = 250  # table accesses per step, for outputs of other engines
MAX_NEW = 256  # maximum number of new tokens since the last step; a history with more is a new text
NUM_PROMPT_TOKENS = 8  # last tokens of the prompt that enter the store with the output
FILE_ROOMS = 2  # largest size of a file relative to the store's tokens, since short texts take more bytes in a file
OUTPUT_SHARE = 16  # unfinished outputs may take 1 / 16 of the store's memory in addition
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Request:
    num_seen: int
    tenant: bytes
    learns: bool
    output: "array[int]" = field(default_factory=lambda: array("i"))


class SuffixLookup(Lookup):
    """Request options: `reference`, as prompt lookup's; `learn`, whether the output enters the store; `tenant`, bytes,
    of the store (the engine derives it from the request's `cache_salt`)."""

    searches_requests: bool = True  # False: the device searches requests' texts, and this class only the store

    def __init__(self, config: SuffixLookupConfig, context: ProposerContext):
        self._max_num_draft = context.max_num_draft
        self._texts = PromptLookup(PromptLookupConfig(), context)  # rows and references of requests
        self.store = SuffixStore(config.store_bytes, self._save)
        self._max_output_bytes, self._output_bytes = config.store_bytes // OUTPUT_SHARE, 0
        self._requests: dict[str, _Request] = {}
        self._work = STORE_WORK
        self._lock = RLock()  # held for reads and changes of the store
        self._saver: StoreSaver | None = None
        self._shared: SharedTexts | None = None
        if config.store_path is not None or config.shared is not None:
            self._load(config, context)

    def _load(self, config: SuffixLookupConfig, context: ProposerContext) -> None:
        """Enters the texts of this engine's file and of the server. Only rank 0 reads, saves and publishes texts."""
        saver, shared, texts = None, None, []
        if context.file_suffix is not None:
            mark = fingerprint(context.tokenize, context.vocab_size)
            if config.store_path is not None:
                path = Path(f"{config.store_path}{context.file_suffix}")
                room = TOKEN_BYTES * self.store.capacity
                file = StoreFile(path, mark, context.vocab_size, FILE_ROOMS * room)
                saver = StoreSaver(file, config.save_every_s, room)
                texts = saver.load(self.store.capacity)
                logger.info("suffix_lookup: the store loaded %d texts from %s.", len(texts), path)
            if config.shared is not None:
                url, size = redis_url(config.shared), (context.vocab_size, self.store.capacity)
                try:
                    shared = SharedTexts(url, mark, *size, config.shared_keep_s)
                except ValueError as error:
                    raise ConfigError(
                        f"suffix_lookup: shared must be an address that redis-py accepts: {error}"
                    ) from None
                texts += shared.fill()
                # Without duplicates.
                texts = list({(text.tenant, text.tokens.tobytes()): text for text in texts}.values())
        for in_use, tenant, text in context.agreed(texts):
            self.store.enter(tenant, text, in_use)
            self.store.work()
        self._saver, self._shared = saver, shared

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts from the request's text, or from earlier outputs with a longer match (`to_beat`)."""
        with self._lock:
            texts = nothing(batch.num_reqs, self._max_num_draft)
            if self.searches_requests:
                texts = self._texts.draft(batch, prefix, limits)
            addresses, lengths = places_of(batch.token_ids)
            owners, has_new = array("q"), False
            for index, (request_id, num_tokens) in enumerate(zip(batch.request_ids, lengths.tolist(), strict=True)):
                request = self._requests.get(request_id)
                if request is None or not 0 <= num_tokens - request.num_seen <= MAX_NEW:
                    request, has_new = self._begin(request_id, batch.token_ids[index], batch.options[index]), True
                num_new = num_tokens - request.num_seen
                if num_new:
                    self._record(request, batch.token_ids[index][-num_new:])
                    request.num_seen, has_new = num_tokens, True
                owners.append(self.store.number(request.tenant))
            stored = np.zeros_like(texts.token_ids), *np.zeros((2, batch.num_reqs), np.int64)
            least = to_beat(texts.num_draft, texts.confidence[:, 0]).astype(np.int64)
            asked = limits, least, np.array(owners, np.int64)
            draft_step((addresses, lengths, *begun(prefix), *asked), *stored, tuple(self.store.ring))
            if has_new:
                self._take_shared()
                self.store.work(self._work)
            return either(stored[1] > 0, of_stage(0, *stored), texts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the texts of these requests. Their outputs enter the store in this order."""
        with self._lock:
            self._texts.forget(request_ids)
            for request_id in request_ids:
                self._finish(request_id)
            self.store.work(STORE_WORK)

    def num_bytes(self) -> int:
        return self._texts.num_bytes() + self.store.num_bytes + self._output_bytes

    def series(self) -> Iterator[Series]:
        yield "store_bytes", (), self.num_bytes()
        yield "stored_outputs", (), self.store.num_texts
        yield "stored_tokens", (), self.store.num_tokens
        for result, count in self._exchanges().items():
            yield "exchanges", (result,), count

    def store_stats(self) -> dict[str, int]:
        store, saver = self.store, self._saver
        return {
            "texts": store.num_texts,
            "tokens": store.num_tokens,
            "max_tokens": store.capacity,
            "tenants": store.num_tenants,
            "bytes": store.num_bytes,
            "removed": store.num_removed,
            "refused": store.num_refused,
            "saves": 0 if saver is None else saver.num_saves,
            "failed_saves": 0 if saver is None else saver.num_failures,
            **self._exchanges(),
        }

    def _exchanges(self) -> dict[str, int]:
        """Returns counts of texts that engines share; empty if they share none."""
        return {} if self._shared is None else self._shared.counts

    def reset_store(self) -> None:
        with self._lock:
            self.store.clear()
            if self._saver is not None:
                self._saver.clear()
            if self._shared is not None:
                self._shared.clear()

    def save_store(self) -> None:
        if self._saver is not None:
            self._saver.save()

    def close(self) -> None:
        """Enters the outputs of all requests and saves them."""
        self.forget(list(self._requests))
        if self._saver is not None:
            self._saver.close()
        if self._shared is not None:
            self._shared.close()

    def _begin(self, request_id: str, history: Int32Array, options: Mapping[str, Any]) -> _Request:
        self._finish(request_id)
        tenant = options.get("tenant")
        tenant = tenant if isinstance(tenant, bytes) else b""
        self.store.ask(tenant)
        request = self._requests[request_id] = _Request(len(history), tenant, options.get("learn", True) is True)
        self._record(request, history[-1 - NUM_PROMPT_TOKENS :])  # one of these tokens is output
        return request

    def _record(self, request: _Request, new: Int32Array) -> None:
        request.learns &= self._output_bytes + new.nbytes <= self._max_output_bytes
        if request.learns:
            request.output.frombytes(new.tobytes())
            self._output_bytes += new.nbytes

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None or not request.output:
            return
        self._output_bytes -= 4 * len(request.output)
        text, self._work = np.frombuffer(request.output, np.int32), STORE_WORK
        if self.store.enter(request.tenant, text):
            stored = StoredText(self.store.is_back(request.tenant), request.tenant, text)
            self._save(stored)
            if self._shared is not None:
                self._shared.add(stored)

    def _take_shared(self) -> None:
        """Enters one text of another engine, unless a text of this engine waits."""
        if self._shared is not None and not self.store.has_work and (text := self._shared.take()) is not None:
            self.store.enter(text.tenant, text.tokens)
            self._work = SHARED_WORK
            self._save(text)

    def _save(self, text: StoredText) -> None:
        if self._saver is not None:
            self._saver.add(text)
