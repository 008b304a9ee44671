"""Texts that engines share through Redis or Valkey: one stream of them for each tokenizer.

A thread publishes what its engine adds and fetches what others have published, so no step waits for the network.
Where the server is away the engine goes on with what it has; what it adds waits, and is published afterwards.
"""

import logging
import os
import time
from collections import deque
from contextlib import suppress
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from vllm_specplugins.structures.suffix.store_file import StoredText, drop_oldest, record, record_at

logger = logging.getLogger("vllm.specplugins")

TEXT, ORIGIN = b"text", b"origin"  # fields of an entry: a record as it stands in a store's file; whose it is
PLACE_BYTES = 8  # of the server's memory for each token of the store, at most
MOST_UNSENT = 10_000  # texts that wait for a server that is away; then the oldest are given up
MOST_WAITING = 1_000  # fetched ones that wait for the engine; then no more are fetched
PARTS = 4  # of the server's memory, which is looked at after each one that is published
LONGEST_LEAD_MS = 60_000  # of an entry before the server's clock
MOST_FETCHED = 32  # in one answer
MOST_TRIES = 10  # to read while others publish
WAIT_S = 0.2  # between looks for others' texts
WAIT_SHARE = 20  # times what a look at the size takes, at least
TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to reach the server
FILL_S = 30.0  # the most that an engine's start waits for texts
GRACE_S = 2.0  # for what is left at the end


class SharedTexts:
    """See the module. Made with the thread not yet running: `fill` is called once, and starts it.

    Args:
        url: redis://, rediss:// or unix://, with user and password if need be, which are never logged.
        mark: engines with the same share texts; see `fingerprint`.
        vocab_size: token ids of others that are not in [0, vocab_size) are ignored, with their texts.
        max_tokens: that the store has room for.
        keep_s: seconds that the server keeps a text.

    Raises:
        ValueError: redis-py refuses the address.
    """

    def __init__(self, url: str, mark: bytes, vocab_size: int, max_tokens: int, keep_s: int):
        import redis

        self._changed = redis.WatchError
        parts = urlsplit(url)
        self._place = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        self._server: Any = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
        )
        self._key, self._origin = f"specplugins:{mark.hex()}", os.urandom(8)
        self._vocab_size, self._max_tokens, self._keep_s = vocab_size, max_tokens, keep_s
        self._unsent: deque[bytes] = deque(maxlen=MOST_UNSENT)
        self._waiting: deque[StoredText] = deque()
        self._fetched_to = b"0"
        self._look_s = 0.0  # what the last look at the stream's size took
        self._pause_s = 0.0  # after the last attempt; 0: it was none in vain
        self._is_cleared, self._is_closing = False, Event()
        self.counts = dict.fromkeys(("published", "fetched", "ignored", "failed"), 0)
        self._thread = Thread(target=self._run, name="specplugins-shared", daemon=True)

    def fill(self) -> list[StoredText]:
        """What others have published so far, the oldest first, no more than the store has room for."""
        deadline, texts, num_tokens = time.monotonic() + FILL_S, deque[StoredText](), 0
        while self._attempt() and self._waiting and time.monotonic() < deadline:
            while self._waiting:
                texts.append(self._waiting.popleft())
                num_tokens += len(texts[-1].tokens)
                while num_tokens > self._max_tokens:
                    num_tokens -= len(texts.popleft().tokens)
        logger.info("suffix_lookup: %d texts fetched from %s.", len(texts), self._place)
        self._thread.start()
        return list(texts)

    def add(self, text: StoredText) -> None:
        """Has a text published."""
        self._unsent.append(record(text))

    def take(self) -> StoredText | None:
        """The next text of another engine's, if there is one."""
        return self._waiting.popleft() if self._waiting else None

    def clear(self) -> None:
        """Has the server forget all texts, and this engine those that wait; what other engines hold stays."""
        self._waiting.clear()
        self._is_cleared = True

    def close(self) -> None:
        """Publishes what is left, if that can be done soon."""
        self._is_closing.set()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._attempt()
            self._is_closing.wait(self._pause_s or max(WAIT_S, WAIT_SHARE * self._look_s))
        with suppress(Exception):
            self._publish()
            self._server.close()

    def _attempt(self) -> bool:
        """Publishes and fetches; False where that fails, which is said once."""
        try:
            self._clear()
            while self._has_room() and self._fetch() == MOST_FETCHED:
                self._publish()
            self._publish()
        except Exception as error:  # of the network, of the server, or of what the address asks of redis-py
            self.counts["failed"] += 1
            if self._pause_s == 0:
                what = "%s cannot be reached (%s); earlier outputs are not shared until that changes."
                logger.warning("suffix_lookup: " + what, self._place, type(error).__name__)
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            drop_oldest(self._unsent, PLACE_BYTES * self._max_tokens)
            return False
        if self._pause_s:
            logger.info("suffix_lookup: %s is reached again.", self._place)
        self._pause_s = 0.0
        return True

    def _has_room(self) -> bool:
        """Whether less waits for the engine than its store has room for."""
        num_tokens = sum(len(text.tokens) for text in tuple(self._waiting))
        return len(self._waiting) < MOST_WAITING and num_tokens < self._max_tokens

    def _clear(self) -> None:
        if self._is_cleared:
            self._server.delete(self._key)
            self._unsent.clear()
            self._is_cleared = False

    def _publish(self) -> None:
        self._clear()
        if not self._unsent:
            return
        num_bytes = 0
        while self._unsent:
            self._server.xadd(self._key, {TEXT: self._unsent[0], ORIGIN: self._origin})
            num_bytes += len(self._unsent.popleft())
            self.counts["published"] += 1
            if num_bytes > PLACE_BYTES * self._max_tokens // PARTS:
                num_bytes = 0
                self._cut()
        self._server.xtrim(self._key, minid=int((time.time() - self._keep_s) * 1000))
        self._server.expire(self._key, self._keep_s)
        self._cut()

    def _cut(self) -> bool:
        """Has the server drop the oldest texts where all take more than they may; whether they did."""
        began, most = time.monotonic(), PLACE_BYTES * self._max_tokens
        num_bytes = self._server.memory_usage(self._key, samples=0) or 0
        self._look_s = time.monotonic() - began
        if num_bytes > most:
            self._server.xtrim(self._key, maxlen=int(0.9 * self._server.xlen(self._key) * most / num_bytes))
        return bool(num_bytes > most)

    def _fetch(self) -> int:
        """How many texts came. A stream with an entry of the future is dropped: it would never expire, and perhaps
        nothing can be added after it."""
        latest = 1000 * self._server.time()[0] + LONGEST_LEAD_MS
        if _milliseconds(self._fetched_to) > latest:  # of a server before this one
            self._fetched_to = b"0"
        found = self._read()
        for place, fields in found[0][1] if found else ():
            if _milliseconds(place) > latest:
                self.counts["ignored"] += 1
                self._server.delete(self._key)
                return 0
            self._fetched_to = place
            if fields.get(ORIGIN) != self._origin:
                self._enter(fields.get(TEXT, b""))
        return len(found[0][1]) if found else 0

    def _read(self) -> Any:
        """What is new on the server; nothing where that is not still as it was when its size was looked at, which
        bounds what others can have this engine read."""
        for _ in range(MOST_TRIES):
            with self._server.pipeline() as reading:
                reading.watch(self._key)
                if self._cut():
                    continue
                reading.multi()
                reading.xread({self._key: self._fetched_to}, MOST_FETCHED)
                with suppress(self._changed):
                    return reading.execute()[0]
        return None

    def _enter(self, data: bytes) -> None:
        text = record_at(data, 0, self._vocab_size)
        if text is None:
            self.counts["ignored"] += 1
        else:
            self.counts["fetched"] += 1
            self._waiting.append(text[0])


def _milliseconds(place: bytes) -> int:
    """When an entry with this id was added, since 1970."""
    return int(place.split(b"-")[0])
