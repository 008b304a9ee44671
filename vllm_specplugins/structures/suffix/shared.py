"""Shares texts between engines through Redis or Valkey, in one stream for each tokenizer. While the server is
unreachable, the engine drafts from the texts that it has, and queues new texts."""

import logging
import os
import time
from collections import deque
from contextlib import suppress
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from vllm_specplugins.structures.pause import Pause
from vllm_specplugins.structures.suffix.store_file import StoredText, drop_oldest, record, record_at

logger = logging.getLogger("vllm.specplugins")

TEXT, ORIGIN = b"text", b"origin"  # fields of an entry: a record as in a store's file, and the engine that published it
PLACE_BYTES = 8  # largest memory on the server for each token of the store
MAX_UNSENT = 10_000  # maximum number of texts that wait for the server; then the oldest are dropped
MAX_WAITING = 1_000  # maximum number of fetched texts that wait for the engine; then the thread fetches no more
PARTS = 4  # the thread checks the server's memory after each part of the limit that it publishes
MAX_FETCHED = 32  # texts in one answer
WAIT_S = 0.2  # between two searches for texts of other engines
WAIT_SHARE = 20  # the wait is at least this multiple of the time to read the stream's size
TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 60.0  # between attempts to reach the server
FILL_S = 30.0  # longest time that an engine's start waits for texts
EXCHANGE_S = 30.0  # longest time to fetch all texts
EXTRA_BYTES = 1 << 20  # of an exchange, in addition to twice the texts that the server may hold
MAX_LEAD_MS = 60_000  # largest lead of an entry's time over the server's clock
GRACE_S = 2.0  # to publish the last texts at the end


class TooMuch(Exception):
    """A server sends more data in an exchange than all texts have, or takes too long."""


class _Exchange:
    """The number of bytes that a server may still send, and the time limit."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self.begin(EXCHANGE_S)

    def begin(self, seconds: float) -> None:
        self._num_left, self._ends_at = self._max_bytes, time.monotonic() + seconds

    def took(self, num_bytes: int) -> int:
        self._num_left -= num_bytes
        if self._num_left < 0 or time.monotonic() > self._ends_at:
            raise TooMuch
        return num_bytes


class _Socket:
    """The socket of a connection, which ends an exchange at its limits."""

    def __init__(self, socket: Any, exchange: _Exchange):
        self._socket, self._exchange = socket, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, *args: Any) -> bytes:
        data: bytes = self._socket.recv(*args)
        self._exchange.took(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        return self._exchange.took(self._socket.recv_into(*args))


class SharedTexts:
    """A thread publishes the texts that its engine adds, and fetches texts that other engines published, so no step
    waits for the network. `fill` starts the thread, and is called once.

    Args:
        url: redis://, rediss:// or unix://, with user and password if necessary; these are never logged.
        mark: engines with the same mark share texts (see `fingerprint`).
        vocab_size: fetched texts with token ids outside [0, vocab_size) are ignored.
        capacity: the store's capacity.
        keep_s: seconds for which the server holds a text.

    Raises:
        ValueError: redis-py refuses the address.
    """

    def __init__(self, url: str, mark: bytes, vocab_size: int, capacity: int, keep_s: int):
        import redis

        parts = urlsplit(url)
        self._place = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
        self._server: Any = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
        )
        self._exchange = exchange = _Exchange(2 * PLACE_BYTES * capacity + EXTRA_BYTES)
        pool, kind = self._server.connection_pool, self._server.connection_pool.connection_class
        connect = {"_connect": lambda connection: _Socket(kind._connect(connection), exchange)}
        pool.connection_class = type("LimitedConnection", (kind,), connect)
        self._key, self._origin = f"specplugins:{mark.hex()}", os.urandom(8)
        self._vocab_size, self._capacity, self._keep_s = vocab_size, capacity, keep_s
        self._unsent: deque[bytes] = deque(maxlen=MAX_UNSENT)
        self._waiting: deque[StoredText] = deque()
        self._fetched_to = b"0"
        self._look_s = 0.0  # duration of the last look at the stream's size
        self._pause = Pause(LONGEST_PAUSE_S)
        self._is_cleared, self._is_closing = False, Event()
        self.counts = dict.fromkeys(("published", "fetched", "ignored", "failed"), 0)
        self._thread = Thread(target=self._run, name="specplugins-shared", daemon=True)

    def fill(self) -> list[StoredText]:
        """Returns the newest texts on the server that fit into the store, oldest first."""
        deadline, texts, num_tokens = time.monotonic() + FILL_S, deque[StoredText](), 0
        while self._attempt(deadline - time.monotonic()) and self._waiting and time.monotonic() < deadline:
            while self._waiting:
                texts.append(self._waiting.popleft())
                num_tokens += len(texts[-1].tokens)
                while num_tokens > self._capacity:
                    num_tokens -= len(texts.popleft().tokens)
        logger.info("suffix_lookup: %d texts fetched from %s.", len(texts), self._place)
        self._thread.start()
        return list(texts)

    def add(self, text: StoredText) -> None:
        """Queues a text for publication."""
        self._unsent.append(record(text))

    def take(self) -> StoredText | None:
        return self._waiting.popleft() if self._waiting else None

    def clear(self) -> None:
        """Drops the texts on the server and the queued ones. The stores of other engines do not change."""
        self._waiting.clear()
        self._is_cleared = True

    def close(self) -> None:
        """Publishes the last texts if the server accepts them soon."""
        self._is_closing.set()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._attempt()
            self._is_closing.wait(self._pause.seconds or max(WAIT_S, WAIT_SHARE * self._look_s))
        with suppress(Exception):
            self._exchange.begin(GRACE_S)
            self._publish()
            self._server.close()

    def _attempt(self, longest_s: float = EXCHANGE_S) -> bool:
        """Publishes and fetches texts. Returns False after a failure, and logs the first failure in a row."""
        self._exchange.begin(longest_s)
        try:
            self._clear()
            if self._pause.seconds:  # another program's text may be too long to read
                self._cut()
            while self._has_room() and self._fetch() == MAX_FETCHED:
                self._publish()
            self._publish()
        except Exception as error:  # of the network, of the server, or of options in the address
            self.counts["failed"] += 1
            if self._pause.failed():
                message = "suffix_lookup shares no outputs, because %s cannot be reached (%s). The engine tries again."
                logger.warning(message, self._place, _cause_of(error))
            drop_oldest(self._unsent, PLACE_BYTES * self._capacity)
            return False
        if self._pause.succeeded():
            logger.info("suffix_lookup: %s is reachable again; outputs are shared.", self._place)
        return True

    def _has_room(self) -> bool:
        num_tokens = sum(len(text.tokens) for text in tuple(self._waiting))
        return len(self._waiting) < MAX_WAITING and num_tokens < self._capacity

    def _clear(self) -> None:
        if self._is_cleared:
            self._server.delete(self._key)
            self._unsent.clear()
            self._is_cleared = False

    def _publish(self) -> None:
        self._clear()
        if not self._unsent:
            return
        num_bytes, oldest_ms = 0, max(0, self._now_ms() - 1000 * self._keep_s)
        while self._unsent:
            self._server.xadd(self._key, {TEXT: self._unsent[0], ORIGIN: self._origin})
            num_bytes += len(self._unsent.popleft())
            self.counts["published"] += 1
            if num_bytes > PLACE_BYTES * self._capacity // PARTS:
                num_bytes = 0
                self._cut()
        self._server.xtrim(self._key, minid=oldest_ms)
        self._server.expire(self._key, self._keep_s)
        self._cut()

    def _cut(self) -> None:
        """Drops the oldest texts of the server if the texts exceed their memory limit."""
        began, max_bytes = time.monotonic(), PLACE_BYTES * self._capacity
        num_bytes = self._server.memory_usage(self._key, samples=0) or 0
        self._look_s = time.monotonic() - began
        if num_bytes > max_bytes:
            self._server.xtrim(self._key, maxlen=int(0.9 * self._server.xlen(self._key) * max_bytes / num_bytes))

    def _now_ms(self) -> int:
        """Returns the server's time since 1970, by which it numbers entries."""
        return 1000 * int(self._server.time()[0])

    def _fetch(self) -> int:
        """Fetches texts and returns their number. It deletes a stream that has an entry of the future: the entry would
        never expire, and the server may refuse to add entries after it."""
        latest = self._now_ms() + MAX_LEAD_MS
        if _time_of(self._fetched_to) > latest:  # the server or its clock changed
            self._fetched_to = b"0"
        streams = self._server.xread({self._key: self._fetched_to}, MAX_FETCHED)
        entries = streams[0][1] if streams else ()
        for place, fields in entries:
            if _time_of(place) > latest:
                self.counts["ignored"] += 1
                self._server.delete(self._key)
                return 0
            self._fetched_to = place
            if fields.get(ORIGIN) != self._origin:
                self._enter(fields.get(TEXT, b""))
        return len(entries)

    def _enter(self, data: bytes) -> None:
        parsed = record_at(data, 0, self._vocab_size)
        if parsed is not None:
            self._waiting.append(parsed[0])
        self.counts["ignored" if parsed is None else "fetched"] += 1


def _cause_of(error: BaseException) -> str:
    """Returns the system's error behind redis-py's one, such as the refusal of a certificate; redis-py's name where
    there is none, since its texts may hold a password."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return type(error).__name__ if cause is None else f"{type(cause).__name__}: {cause.strerror or cause}"


def _time_of(place: bytes) -> int:
    """Returns the milliseconds since 1970 in an entry's id."""
    return int(place.split(b"-")[0])
