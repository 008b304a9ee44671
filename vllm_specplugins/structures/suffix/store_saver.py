"""Saves the texts of a suffix store to a file in the order in which they enter the store."""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from vllm_specplugins.structures.pause import Pause
from vllm_specplugins.structures.suffix.store_file import (
    DamagedError,
    StoredText,
    StoreFile,
    StoreFileError,
    drop_oldest,
    record,
)

logger = logging.getLogger("vllm.specplugins")

MAX_UNSAVED = 10_000  # maximum number of texts that wait for a file that cannot be written; then the oldest are dropped
LONGEST_PAUSE_S = 600.0  # between attempts to write such a file
LOOK_S = 1.0  # interval at which a waiting thread checks that the saving thread still works
GRACE_S = 4.0  # to write the last texts at the end; vLLM gives a worker 5 s


class StoreSaver:
    """Appends each text to the file in a thread; the file must not be open yet. A killed process loses the texts that
    the thread has not written. A power cut also loses the texts after the last sync, which follows a text within
    sync_every_s. Waiting texts take at most max_bytes."""

    def __init__(self, file: StoreFile, sync_every_s: float, max_bytes: int):
        self._file, self._sync_every_s, self._max_bytes = file, sync_every_s, max_bytes
        self._unsaved: deque[bytes] = deque(maxlen=MAX_UNSAVED)
        self._is_useless = False  # the file cannot be used and may be replaced
        self._due_at: float | None = None  # time of the next sync or attempt
        self._pause = Pause(LONGEST_PAUSE_S)
        self.num_saves = self.num_failures = 0
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="specplugins-store", daemon=True)

    def load(self, capacity: int) -> list[StoredText]:
        """Starts the thread, and returns the newest texts of the file, up to capacity. It logs one sentence if the
        file cannot be read or written."""
        texts: list[StoredText] | None = self._attempt(self._file.open)
        if texts is None and not self._is_useless:
            with suppress(StoreFileError, OSError, MemoryError):  # which is in the log
                texts = self._file.read()
        if self._file.num_damaged:
            logger.warning(
                "suffix_lookup: %s has %d damaged texts, which are skipped.", self._file.path, self._file.num_damaged
            )
        self._thread.start()
        newest = list(reversed(texts or []))
        num_tokens = accumulate(len(text.tokens) for text in newest)
        return newest[: sum(number <= capacity for number in num_tokens)][::-1]

    def add(self, text: StoredText) -> None:
        """Queues a text that has entered the store."""
        self._jobs.put(partial(self._append, record(text)))

    def clear(self) -> None:
        self._wait_for(self._empty)

    def save(self) -> None:
        """Waits until the added texts are on the disk."""
        self._wait_for(self._sync)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(GRACE_S)

    def _wait_for(self, job: Callable[[], Any]) -> None:
        is_done = Event()
        self._jobs.put(job)
        self._jobs.put(is_done.set)
        while self._thread.is_alive() and not is_done.wait(LOOK_S):
            pass

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()
        self._sync()
        self._file.close()

    def _next_job(self) -> Callable[[], Any] | None:
        wait_s = None if self._due_at is None else max(0.0, self._due_at - time.monotonic())
        try:
            return self._jobs.get(timeout=wait_s)
        except Empty:
            return self._sync

    def _append(self, data: bytes) -> None:
        self._unsaved.append(data)
        if self._pause.seconds == 0 or self._due_at is None:
            self._attempt(self._write)
            self._due_at = self._due_at or time.monotonic() + self._sync_every_s
        drop_oldest(self._unsaved, self._max_bytes)

    def _sync(self) -> None:
        self._due_at = None
        if (not self._unsaved or self._attempt(self._write)) and self._file.is_open:
            self._attempt(self._file.sync)

    def _empty(self) -> None:
        self._unsaved.clear()
        self._attempt(partial(self._write, is_empty=True))

    def _write(self, is_empty: bool = False) -> bool:
        if not self._file.is_open:
            self._file.open(replaces=self._is_useless)
            self._is_useless = False
        if is_empty:
            self._file.clear()
        while self._unsaved:
            self._file.append(self._unsaved[0])
            self._unsaved.popleft()
        self.num_saves += 1
        return True

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Returns the result of the work. A failure closes the file and returns None; the first failure in a row is
        logged."""
        try:
            result = work()
        except Exception as error:  # including a lack of memory
            self._file.close()
            is_first, self._is_useless = self._pause.failed(), isinstance(error, DamagedError)
            self._due_at = time.monotonic() + self._pause.seconds
            self.num_failures += 1
            cause = error.strerror if isinstance(error, OSError) else type(error).__name__
            is_sentence = isinstance(error, StoreFileError)
            problem = error if is_sentence else f"the store {self._file.path} cannot be saved ({cause})"
            if self._is_useless:
                logger.warning("suffix_lookup: %s. The store starts empty and replaces the file.", problem)
            elif is_first:
                logger.warning("suffix_lookup: %s. Outputs stay in memory, and saving is tried again.", problem)
            return None
        self._pause.succeeded()
        return result
