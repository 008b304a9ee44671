"""Keeps a suffix store in a file: a thread appends each text that enters it.

What a process that is killed loses is what the thread has not had yet; a power cut costs what came since the disk was
last waited for. When texts that left the store fill the file, it is written anew from a copy of the store that is
taken by pieces, a step at a time; so it is when the engine ends, in the order of use.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from vllm_specplugins.structures.suffix.pages import PROVEN
from vllm_specplugins.structures.suffix.store import SuffixStore
from vllm_specplugins.structures.suffix.store_file import DamagedError, StoredText, StoreFile, StoreFileError, record

logger = logging.getLogger("vllm.specplugins")

PAGES_AT_ONCE = 512  # that a step looks for texts in
MOST_UNSAVED = 10_000  # texts that wait for a file that cannot be written; then the oldest are given up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0  # between attempts to write such a file
GRACE_S = 4.0  # for the last save: vLLM gives a worker 5 s to end
FILE_SHARE = 8  # a file is written anew that has one part in so many of the store's bytes: about twice what fits

_Job = Callable[[], Any]
_Copied = tuple[tuple[int, int], bytes, Any]  # its place in the order of use, its tenant and its tokens


class StoreSaver:
    """See the module.

    Args:
        store: what is saved.
        file: where.
        sync_every_s: seconds from a text to when the disk is waited for.
    """

    def __init__(self, store: SuffixStore, file: StoreFile, sync_every_s: float):
        self._store, self._max_file_bytes = store, store.num_bytes // FILE_SHARE
        self._page = -1  # the next one to be looked at, while a copy is taken
        self._copied: list[_Copied] = []
        self._late: list[StoredText] = []  # that entered meanwhile
        self._is_written = Event()
        self._is_written.set()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.writer = _Writer(file, sync_every_s)
        self._thread = Thread(target=self.writer.run, args=(self._jobs,), name="specplugins-store", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def add(self, text: StoredText) -> None:
        """Has a text appended that enters the store."""
        self._jobs.put(partial(self.writer.append, text))
        if self._page >= 0:
            self._late.append(text)

    def step(self) -> None:
        """Goes on with a copy of the store, or begins one if the file has become too large."""
        if self._page >= 0:
            self._copy(self._page + PAGES_AT_ONCE)
            if self._page < 0:
                self._rewrite()
        elif self._is_written.is_set() and self.writer.wants_copy(self._max_file_bytes):
            self._page = 0

    def save(self, wait_s: float | None = None) -> None:
        """Writes the file anew, with all that the store holds."""
        self._store.work()
        self._page, self._copied, self._late = 0, [], []
        self._copy(self._store.texts.num_pages)
        self._rewrite()
        self._is_written.wait(wait_s)

    def close(self) -> None:
        """Saves for the last time, and lets go of the file."""
        if not self._end.alive:
            return
        if self.writer.knows_all:
            self.save(GRACE_S)
        self._end()
        self._thread.join(GRACE_S)

    def _copy(self, end: int) -> None:
        self._copied += self._store.contents_of(self._page, end)
        self._page = end if end < self._store.texts.num_pages else -1

    def _rewrite(self) -> None:
        self._is_written.clear()
        self._jobs.put(partial(self.writer.rewrite, self._copied, self._late, self._is_written))
        self._copied, self._late = [], []


class _Writer:
    """What the thread does with the file."""

    def __init__(self, file: StoreFile, sync_every_s: float):
        self.file, self._sync_every_s = file, sync_every_s
        self._unsaved: deque[bytes] = deque(maxlen=MOST_UNSAVED)
        self._is_useless = False  # what the file holds
        self.knows_all = True  # whether no other engine has added to it since it was read
        self._is_behind = False  # the file lacks texts that do not wait any more
        self._due_at: float | None = None  # when to try again, or to wait for the disk
        self._pause_s = 0.0  # after the last attempt; 0: it was none in vain
        self.num_saves = self.num_failures = 0

    def load(self) -> list[StoredText]:
        """The file's texts. Why there are none, or why they are not saved, is said in one sentence."""
        texts: list[StoredText] | None = self._attempt(self.file.open)
        if texts is None and not self._is_useless:
            self.knows_all = False
            with suppress(StoreFileError, OSError):  # which was said
                texts = self.file.read()
        if self.file.num_dropped:
            logger.warning("suffix_lookup: %s: %d bytes at its end are damaged.", self.file.path, self.file.num_dropped)
        return texts or []

    def wants_copy(self, max_bytes: int) -> bool:
        """Whether the file should be written anew, and may be."""
        return self._may_try and (self.file.num_bytes > max_bytes or self._is_behind)

    def run(self, jobs: "SimpleQueue[_Job | None]") -> None:
        """Does what comes, until that is None."""
        while (job := self._next_job(jobs)) is not None:
            job()
        if self._unsaved:
            self._save()
        self.file.close()

    def append(self, text: StoredText) -> None:
        """Adds a text to the file, or to what waits for it."""
        self._is_behind |= len(self._unsaved) == MOST_UNSAVED
        self._unsaved.append(record(text))
        if self._may_try:
            self._save()

    def rewrite(self, copied: list[_Copied], late: list[StoredText], is_written: Event) -> None:
        """Writes the file anew. These are all the texts there are, and those that came while they were copied."""
        copied.sort(key=lambda text: text[0])
        texts = [*(StoredText(kind == PROVEN, tenant, tokens) for (kind, _), tenant, tokens in copied), *late]
        self._unsaved.clear()
        self._is_behind = True
        self._attempt(lambda: self._replace([record(text) for text in texts]))
        self._is_behind = self._pause_s > 0
        is_written.set()

    def _next_job(self, jobs: "SimpleQueue[_Job | None]") -> _Job | None:
        wait_s = None if self._due_at is None else self._due_at - time.monotonic()
        try:
            return jobs.get(timeout=wait_s) if wait_s is None or wait_s > 0 else self._catch_up
        except Empty:
            return self._catch_up

    def _catch_up(self) -> None:
        self._due_at = None
        if self._unsaved:
            self._save()
        elif self.file.is_open:
            self._attempt(self.file.sync)
            self._is_behind |= not self.file.is_open

    @property
    def _may_try(self) -> bool:
        """Whether there is no pause after an attempt in vain."""
        return self._pause_s == 0 or self._due_at is None

    def _save(self) -> None:
        is_saved = self._attempt(self._append_unsaved)
        if is_saved and self._due_at is None:
            self._due_at = time.monotonic() + self._sync_every_s

    def _append_unsaved(self) -> bool:
        if self._is_useless:
            self._replace(())
        elif not self.file.is_open:
            self.file.open()
        self.file.append(self._unsaved)
        self._unsaved.clear()
        return True

    def _replace(self, records: Sequence[bytes]) -> None:
        if not self.file.is_open and not self._is_useless:
            self.file.open()
        self.file.write(records)
        self._is_useless = False
        self.num_saves += 1

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
                error = StoreFileError(f"the store {self.file.path} cannot be saved ({error.strerror})")
            logger.warning("suffix_lookup: %s; nothing is saved until that changes.", error)
