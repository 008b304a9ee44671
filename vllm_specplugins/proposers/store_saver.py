"""Keeps a suffix store in a file: loads it, and saves it now and then while requests are served.

A save copies texts by pieces, a step at a time, and a thread writes them.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from vllm_specplugins.structures import store_file
from vllm_specplugins.structures.store_file import StoreFileError
from vllm_specplugins.structures.suffix_store import SuffixStore

logger = logging.getLogger("vllm.specplugins")

PAGES_AT_ONCE = 512  # that a step looks for texts in


class StoreSaver:
    """See the module.

    Args:
        store: what is saved.
        path: of the file.
        mark: see store_file.fingerprint.
        every_s: seconds from the end of one save to the next.
        clock: seconds.
    """

    def __init__(
        self, store: SuffixStore, path: Path, mark: bytes, every_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._store, self._path, self._mark, self._every_s, self._clock = store, path, mark, every_s, clock
        self._next_at = clock() + every_s
        self._page = -1  # the next one to be looked at, while a save goes on
        self._records: list[bytes] = []
        self._thread: Thread | None = None
        self.num_saves = 0
        self.num_failures = 0

    def load(self, vocab_size: int) -> None:
        """Enters the file's texts; says in one sentence why it cannot be used, if so, and the store stays empty."""
        if not self._path.exists():
            return
        try:
            texts = store_file.read(self._path, self._mark, vocab_size, self._store.num_bytes)
        except StoreFileError as error:
            logger.warning("suffix_lookup: %s; the store begins empty.", error)
        except OSError as error:
            logger.warning("suffix_lookup: %s cannot be read (%s); the store begins empty.", self._path, error.strerror)
        else:
            for tenant, text in texts:
                self._store.enter(tenant, text)
                self._store.work()
            logger.info("suffix_lookup: %d texts loaded from %s.", self._store.num_texts, self._path)

    def step(self) -> None:
        """Goes on with a save, or begins one if it is time."""
        if self._page >= 0:
            end = self._page + PAGES_AT_ONCE
            self._records += [store_file.record(*text) for text in self._store.contents_of(self._page, end)]
            self._page = end if end < self._store.texts.num_pages else -1
            if self._page < 0:
                self._thread = Thread(target=self._write, args=(self._records,), daemon=True)
                self._thread.start()
                self._records = []
        elif self._clock() >= self._next_at and (self._thread is None or not self._thread.is_alive()):
            self._page = 0

    def save(self) -> None:
        """Saves the store at once."""
        if self._thread is not None:
            self._thread.join()
        self._page, self._records = -1, []
        texts = self._store.contents_of(0, self._store.texts.num_pages)
        self._write([store_file.record(*text) for text in texts])

    def _write(self, records: list[bytes]) -> None:
        try:
            store_file.write(self._path, self._mark, records)
            self.num_saves += 1
        except OSError as error:
            self.num_failures += 1
            if self.num_failures == 1:
                logger.warning("suffix_lookup: the store cannot be saved to %s (%s).", self._path, error.strerror)
        self._next_at = self._clock() + self._every_s
