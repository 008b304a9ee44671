"""Keeps a suffix store in a file: a thread appends each text that enters it, in the same order.

What a process that is killed loses is what the thread has not had yet; a power cut costs what came since the disk was
last waited for. A file that has become twice as large as what the store has room for loses its first half.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from vllm_specplugins.structures.suffix.store_file import (
    TOKEN_BYTES,
    DamagedError,
    StoredText,
    StoreFile,
    StoreFileError,
    drop_oldest,
    record,
)

logger = logging.getLogger("vllm.specplugins")

MOST_UNSAVED = 10_000  # texts that wait for a file that cannot be written; then the oldest are given up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0  # between attempts to write such a file
GRACE_S = 4.0  # for what is left at the end: vLLM gives a worker 5 s


class StoreSaver:
    """See the module.

    Args:
        file: where.
        sync_every_s: seconds from a text to when the disk is waited for.
        max_tokens: that the store has room for.
    """

    def __init__(self, file: StoreFile, sync_every_s: float, max_tokens: int):
        self._file, self._sync_every_s, self._max_tokens = file, sync_every_s, max_tokens
        self._unsaved: deque[bytes] = deque(maxlen=MOST_UNSAVED)
        self._is_useless = False  # what the file holds
        self._due_at: float | None = None  # when to try again, or to wait for the disk
        self._pause_s = 0.0  # after the last attempt; 0: it was none in vain
        self.num_saves = self.num_failures = 0
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="specplugins-store", daemon=True)

    def load(self) -> list[StoredText]:
        """The file's newest texts, as many as the store has room for. Why there are none, or why they are not saved, is
        said in one sentence. From then on the thread runs."""
        texts: list[StoredText] | None = self._attempt(self._file.open)
        if texts is None and not self._is_useless:
            with suppress(StoreFileError, OSError):  # which was said
                texts = self._file.read()
        if self._file.num_dropped:
            logger.warning(
                "suffix_lookup: %s: %d bytes at its end are damaged.", self._file.path, self._file.num_dropped
            )
        self._thread.start()
        newest, num_tokens = texts or [], 0
        for index in reversed(range(len(newest))):
            num_tokens += len(newest[index].tokens)
            if num_tokens > self._max_tokens:
                return newest[index + 1 :]
        return newest

    def add(self, text: StoredText) -> None:
        """Has a text appended that enters the store."""
        self._jobs.put(partial(self._append, text))

    def clear(self) -> None:
        """Empties the file."""
        self._wait_for(self._empty)

    def save(self) -> None:
        """Waits until what was added is on the disk."""
        self._wait_for(self._sync)

    def close(self) -> None:
        """Saves for the last time, and lets go of the file."""
        self._jobs.put(None)
        self._thread.join(GRACE_S)

    def _wait_for(self, job: Callable[[], Any]) -> None:
        is_done = Event()
        self._jobs.put(job)
        self._jobs.put(is_done.set)
        is_done.wait()

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

    def _append(self, text: StoredText) -> None:
        self._unsaved.append(record(text))
        if self._pause_s == 0 or self._due_at is None:
            self._attempt(self._write)
            self._due_at = self._due_at or time.monotonic() + self._sync_every_s
        drop_oldest(self._unsaved, TOKEN_BYTES * self._max_tokens)

    def _sync(self) -> None:
        self._due_at = None
        if (not self._unsaved or self._attempt(self._write)) and self._file.is_open:
            self._attempt(self._file.sync)

    def _empty(self) -> None:
        self._unsaved.clear()
        self._attempt(partial(self._write, True))

    def _write(self, is_empty: bool = False) -> bool:
        if not self._file.is_open and not self._is_useless:
            self._file.open()
        if self._is_useless or is_empty:
            self._file.write(())
            self._is_useless = False
        self._file.append(self._unsaved)
        self._unsaved.clear()
        self._file.shorten(TOKEN_BYTES * self._max_tokens)
        self.num_saves += 1
        return True

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """What the work returns; None where it fails, which is said once, and tried again after longer and longer
        pauses."""
        try:
            result = work()
        except (StoreFileError, OSError) as error:
            self._is_useless = isinstance(error, DamagedError)
            self._complain(error)
            self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._due_at = time.monotonic() + self._pause_s
            return None
        self._pause_s = 0.0
        return result

    def _complain(self, error: Exception) -> None:
        self.num_failures += 1
        if self._is_useless:
            logger.warning("suffix_lookup: %s; the store begins empty.", error)
        elif self._pause_s == 0:
            if isinstance(error, OSError):
                error = StoreFileError(f"the store {self._file.path} cannot be saved ({error.strerror})")
            logger.warning("suffix_lookup: %s; nothing is saved until that changes.", error)
