"""The store's file: what was written whole is read again, whatever happens to the rest."""

import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_specplugins.structures.suffix.store_file import (
    HEADER,
    MARKER,
    DamagedError,
    StoredText,
    StoreFile,
    StoreFileError,
    fingerprint,
    record,
)

VOCAB_SIZE = 1000
MARK = fingerprint(lambda text: list(text.encode()), VOCAB_SIZE)
TEXTS = [StoredText(i % 2 == 0, bytes([65 + i]) * (i % 3), np.arange(i, 5 * i + 3, dtype=np.int32)) for i in range(40)]


def store(path: Path, mark: bytes = MARK, vocab_size: int = VOCAB_SIZE, max_bytes: int = 1 << 20) -> StoreFile:
    return StoreFile(path, mark, vocab_size, max_bytes)


def saved(path: Path, texts: list[StoredText] = TEXTS, max_bytes: int = 1 << 20) -> bytes:
    file = store(path, max_bytes=max_bytes)
    file.open()
    for text in texts:
        file.append(record(text))
    file.close()
    return path.read_bytes()


def shown(texts: list[StoredText]) -> list[tuple[bool, bytes, list[int]]]:
    return [(in_use, tenant, tokens.tolist()) for in_use, tenant, tokens in texts]


def test_round_trip(tmp_path: Path) -> None:
    """What is read is what was appended, in order, for its owner alone, whoever made the file before, whatever the
    umask is. Fails if order, flag or mode is another, or something is left beside it.
    """
    path = tmp_path / "store"
    mask = os.umask(0o777)
    saved(path, TEXTS[:7])
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    saved(path, TEXTS[7:])
    assert shown(store(path).open()) == shown(TEXTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_ring(tmp_path: Path) -> None:
    """Of 400 texts in a file that is opened now and then, with another room each time, the newest stay: all that the
    smallest of two rooms holds, without a rename. Kills: an order by place; a text that is written over a newer one; a
    file that outgrows its room; old texts that stay behind a smaller room.
    """
    path, rng, texts, rooms = tmp_path / "store", random.Random(2), list[StoredText](), [3000]
    inode = None
    for turn in range(100):
        rooms.append(rng.choice([1500, 3000, 6000]))
        new = [TEXTS[rng.randrange(40)] for _ in range(rng.randrange(1, 8))]
        saved(path, new, max_bytes=rooms[-1])
        texts += new
        read = shown(store(path).read())
        num_bytes = sum(len(record(text)) + 12 for text in texts[-len(read) :])
        assert read == shown(texts[-len(read) :])
        assert num_bytes > min(rooms[-8:]) - 1000 or len(read) == len(texts)
        assert path.stat().st_size <= max(rooms) and inode in (None, path.stat().st_ino), turn
        inode = path.stat().st_ino


def test_mutations(tmp_path: Path) -> None:
    """Of 300 damaged files all texts but the damaged one are read, and appended to; or one sentence says why none.
    Fails if a digest is not looked at, an error passes, or texts behind the damage are lost, or written over.
    """
    path, rng = tmp_path / "store", random.Random(1)
    whole = saved(path)
    for number in range(300):
        data = bytearray(whole)
        kind = number % 4
        place, num_damaged = rng.randrange(len(data)), 1
        if kind == 0:
            num_damaged = data[place:].count(MARKER) + 1
            del data[place:]
        elif kind == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            num_bytes = rng.randrange(1, 50)
            num_damaged = data[place - 3 : place + num_bytes + 3].count(MARKER) + 1
            data[place : place + num_bytes] = rng.randbytes(rng.randrange(60))
        else:
            place = len(data)
            data += rng.randbytes(rng.randrange(1, 50))
        path.write_bytes(data)
        file = store(path)
        try:
            texts = file.open()
        except StoreFileError as error:
            assert "\n" not in str(error) and place < HEADER.size
            continue
        left = iter(shown(TEXTS))
        assert all(text in left for text in shown(texts))  # in order
        assert len(texts) >= len(TEXTS) - (len(TEXTS) if place < HEADER.size else num_damaged)
        file.append(record(TEXTS[0]))
        file.close()
        assert shown(store(path).read()) == shown([*texts, TEXTS[0]])


@pytest.mark.parametrize("length", range(HEADER.size + 1))
def test_header_cut(tmp_path: Path, length: int) -> None:
    """A full disk or a quota cuts the header anywhere: the store is empty, and is saved to. Kills: a length that is
    refused for ever."""
    (tmp_path / "store").write_bytes(saved(tmp_path / "other", [])[:length])
    assert len(saved(tmp_path / "store", TEXTS[:1])) > HEADER.size
    assert shown(store(tmp_path / "store").read()) == shown(TEXTS[:1])


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1, expected 3"), (2, "version 2"), (3, "another tokenizer")]
)
def test_foreign(tmp_path: Path, version: int, message: str) -> None:
    """A store of another tokenizer or version, 0.1.0's too, is refused, and emptied where that is asked for; what is
    no store never. Fails if fingerprint or version is not looked at.
    """
    path = tmp_path / "store"
    path.write_bytes(HEADER.pack(b"specstor", version, b"x" * 16) + b"x" * 100)
    with pytest.raises(DamagedError, match=message):
        store(path).open()
    file = store(path)
    assert file.open(replaces=True) == [] and path.stat().st_size == HEADER.size
    file.close()
    path.write_bytes(b"x" * 100)
    with pytest.raises(StoreFileError, match="is not a store"):
        store(path).open(replaces=True)
    assert path.stat().st_size == 100


@pytest.mark.parametrize("damage", ["emptied", "overwritten", "removed"])
def test_changed_by_others(tmp_path: Path, damage: str) -> None:
    """Kills: texts that are appended for ever to a file that an operator emptied, overwrote or removed, and that the
    next start does not find."""
    path = tmp_path / "store"
    file = store(path)
    file.open()
    file.append(record(TEXTS[0]))
    if damage == "removed":
        path.unlink()
    else:
        path.write_text("" if damage == "emptied" else "All happy families are alike, but")
    with pytest.raises(OSError, match=r"another|No such"):
        file.sync() if damage == "removed" else file.append(record(TEXTS[1]))
    file.close()


def test_links(tmp_path: Path) -> None:
    """A link is followed, and stays one. Fails if the link is replaced by a file."""
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "store", tmp_path / "real" / "file"
    link.symlink_to(real)
    saved(link)
    assert link.is_symlink() and shown(store(real).read()) == shown(TEXTS)


def test_one_at_a_time(tmp_path: Path) -> None:
    """Who comes second may read; the file is free when the first lets go, although a forked copy of it goes on. Fails
    if the second may save, too, or if a copy holds the lock."""
    path = tmp_path / "store"
    first, second = store(path), store(path)
    first.open()
    first.append(record(TEXTS[0]))
    with pytest.raises(StoreFileError, match="in use by another engine"):
        second.open()
    assert len(second.read()) == 1
    reads, writes = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.write(writes, b"x")
        signal.pause()
    try:
        assert os.read(reads, 1) == b"x"
        first.close()
        assert len(second.open()) == 1
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        second.close()


def test_fingerprint() -> None:
    """Other ids for the same text, or another size of vocabulary, is another tokenizer; none at all is one, too."""

    def none(text: str) -> list[int]:
        raise ValueError

    marks = {
        MARK,
        fingerprint(lambda text: [*text.encode(), 1], VOCAB_SIZE),
        fingerprint(none, 5),
        fingerprint(none, 6),
    }
    assert len(marks) == 4 and {len(mark) for mark in marks} == {16}


KILLED = """
import sys, numpy as np
from pathlib import Path
from vllm_specplugins.structures.suffix.store_file import StoredText, StoreFile, record
file = StoreFile(Path(sys.argv[1]), b"m" * 16, 1000, 400_000)
text = lambda index: StoredText(False, b"", np.full(1000, index % 1000, np.int32))
texts = file.open()
number = int(sys.argv[2])
while True:
    file.append(record(text(number)))
    number += 1
    print(number, flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """A process that is killed anywhere loses nothing that it has appended, 10 times, but what the room does not hold.
    Fails if a text waits in memory, or older texts are moved.
    """
    path, rng, number = tmp_path / "store", random.Random(0), 0
    for _ in range(10):
        command = [sys.executable, "-c", KILLED, str(path), str(number)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 300)):
            number = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        number = max([number, *map(int, process.stdout.read().split("\n")[:-1])])
        process.wait()
        process.stdout.close()
        texts = store(path, b"m" * 16).read()
        last = int(texts[-1].tokens[0])
        assert last in ((number - 1) % 1000, number % 1000) and len(texts) >= min(number, 97)
        assert [int(text.tokens[0]) for text in texts] == [(last - place) % 1000 for place in range(len(texts))][::-1]
        number += last == number % 1000
