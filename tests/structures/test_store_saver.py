"""The thread that saves a store: what happens to its file from outside costs no later text; docstrings say more."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vllm_specplugins.structures.suffix.store_file import StoredText, StoreFile
from vllm_specplugins.structures.suffix.store_saver import StoreSaver

ROOM = 2000  # tokens


def saver(path: Path, room: int = ROOM) -> tuple[StoreSaver, list[int]]:
    """A saver that has begun, and the texts that it loaded, by their first token."""
    new = StoreSaver(StoreFile(path, b"m" * 16, 4096, 8 * room), 1, 4 * room)
    return new, [int(text.tokens[0]) for text in new.load(room)]


def add(own: StoreSaver, numbers: range) -> None:
    for number in numbers:
        own.add(StoredText(False, b"", np.full(50, number, np.int32)))


def saved(path: Path) -> list[int]:
    return [int(text.tokens[0]) for text in StoreFile(path, b"m" * 16, 4096, 0).read()]


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("damage", ["emptied", "no memory", "no rename"])
def test_a_file_that_is_changed(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator empties it, memory lacks for a while, or renames are refused, as of a file that is mounted alone:
    one line says so where something failed, what is added then and later is saved, and the file stays in its bounds.
    Kills: saves that succeed into a hole; an exception that ends the thread; a file that is shortened by a rename.
    """
    path = tmp_path / "store"
    own, _ = saver(path)
    add(own, range(20))
    own.save()
    with monkeypatch.context() as patched:
        if damage == "emptied":
            path.write_bytes(b"")
        elif damage == "no memory":
            patched.setattr(StoreFile, "append", lambda self, data: bytes(1 << 62))
        else:
            patched.setattr(os, "replace", lambda *_: 1 / 0)
            patched.setattr(os, "rename", lambda *_: 1 / 0)
        add(own, range(20, 25))
        wait_for(lambda: own.num_failures or damage == "no rename")
    wait_for(lambda: not own._unsaved)
    add(own, range(25, 400))
    own.save()
    assert saved(path)[-60:] == list(range(340, 400)) and path.stat().st_size <= 8 * ROOM
    assert caplog.text.count("cannot be saved") == (damage != "no rename")
    own.close()


def test_a_thread_that_ended(tmp_path: Path) -> None:
    """Kills: a reset or a save that waits for ever for a thread that is gone; the engine would stand."""
    own, _ = saver(tmp_path / "store")
    own.close()
    own.save()
    own.clear()


def test_a_smaller_room(tmp_path: Path) -> None:
    """The newest texts that fit are loaded, none is lost, and the file shrinks in time. Kills: a file that is refused
    or emptied, since it has more than the store's room."""
    path = tmp_path / "store"
    own, _ = saver(path, 10 * ROOM)
    add(own, range(400))
    own.close()
    own, loaded = saver(path)
    assert loaded == list(range(360, 400))
    add(own, range(400, 401))
    own.save()
    assert saved(path)[-300:] == list(range(101, 401))
    add(own, range(401, 500))
    own.close()
    assert path.stat().st_size <= 8 * ROOM and saved(path)[-60:] == list(range(440, 500))
