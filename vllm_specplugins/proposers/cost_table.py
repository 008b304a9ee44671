"""A file for what a gate has learned of costs, so that a restart need not learn it again.

It is JSON: what the times depend on (model, device, versions, the cascade), the times, and a digest of both. It is
written beside and moved, by a thread, so that a crash loses the new file alone.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from vllm_specplugins.proposers.switch import Clock

logger = logging.getLogger("vllm.specplugins")

SAVE_EVERY_S = 10.0
MAX_BYTES = 1 << 20


class CostTableError(ValueError):
    """A file that cannot be used; the message is one sentence."""


def written(setting: str, costs: Mapping[str, Any]) -> str:
    """What a file holds."""
    return json.dumps({"setting": setting, "costs": costs, "digest": _digest(setting, costs)}, indent=1)


def read(path: Path, setting: str) -> dict[str, Any]:
    """The costs of a file.

    Raises:
        CostTableError: it is no such file, damaged, or of another setting.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        held = json.loads(data)
        is_whole = len(data) <= MAX_BYTES and held["digest"] == _digest(held["setting"], held["costs"])
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CostTableError(f"{path} is no table of costs, or damaged")
    if held["setting"] != setting:
        raise CostTableError(f"{path} is of another setting ({held['setting']}, not {setting})")
    costs: dict[str, Any] = held["costs"]
    return costs


def _digest(setting: Any, costs: Any) -> str:
    words = json.dumps([setting, costs], sort_keys=True).encode()
    return hashlib.blake2b(words, digest_size=16).hexdigest()


class CostTable:
    """See the module.

    Args:
        path: of the file.
        setting: what the times depend on.
        clock: seconds.
    """

    def __init__(self, path: Path, setting: str, clock: Clock = time.monotonic):
        self._path, self._setting, self._clock = path, setting, clock
        self._next_at = clock() + SAVE_EVERY_S
        self._thread: Thread | None = None
        self._has_failed = False

    def load(self) -> dict[str, Any] | None:
        """What the file holds; None, and one sentence in the log, where it cannot be used."""
        if not self._path.exists():
            return None
        try:
            costs = read(self._path, self._setting)
        except CostTableError as error:
            logger.warning("cost_table: %s; costs are learned anew.", error)
        except OSError as error:
            logger.warning("cost_table: %s cannot be read (%s); costs are learned anew.", self._path, error.strerror)
        else:
            logger.info("cost_table: costs taken from %s.", self._path)
            return costs
        return None

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self._clock() >= self._next_at and (self._thread is None or not self._thread.is_alive())

    def save(self, costs: Mapping[str, Any]) -> None:
        """Has a thread write the file."""
        self._next_at = self._clock() + SAVE_EVERY_S
        self._thread = Thread(target=self._write, args=(written(self._setting, costs),), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the newest save."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, words: str) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            with partial.open("w") as file:
                file.write(words)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("cost_table: costs cannot be saved to %s (%s).", self._path, error.strerror)
            self._has_failed = True
