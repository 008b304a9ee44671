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

from vllm_specplugins.structures.suffix import store_file
from vllm_specplugins.structures.suffix.store_file import (
    HEADER,
    DamagedError,
    StoredText,
    StoreFile,
    StoreFileError,
    fingerprint,
    record,
)
from vllm_specplugins.structures.whole_file import PARTIAL

VOCAB_SIZE = 1000
MARK = fingerprint(lambda text: list(text.encode()), VOCAB_SIZE)
TEXTS = [StoredText(i % 2 == 0, bytes([65 + i]) * (i % 3), np.arange(i, 5 * i + 3, dtype=np.int32)) for i in range(40)]


def store(path: Path, mark: bytes = MARK, vocab_size: int = VOCAB_SIZE, max_bytes: int = 1 << 20) -> StoreFile:
    return StoreFile(path, mark, vocab_size, max_bytes)


def saved(path: Path) -> bytes:
    file = store(path)
    file.write([record(text) for text in TEXTS])
    file.close()
    return path.read_bytes()


def shown(texts: list[StoredText]) -> list[tuple[bool, bytes, list[int]]]:
    return [(in_use, tenant, tokens.tolist()) for in_use, tenant, tokens in texts]


def test_round_trip(tmp_path: Path) -> None:
    """What is read is what was written and appended, in order, for its owner alone, whoever made the file before.
    Fails if order, flag or mode is another, or something is left beside it.
    """
    path = tmp_path / "store"
    path.touch(0o666)
    file = store(path)
    assert file.open() == []
    file.append([record(text) for text in TEXTS[:7]])
    file.append([])
    assert shown(file.read()) == shown(TEXTS[:7])
    file.write([record(text) for text in TEXTS[:3]])
    file.append([record(text) for text in TEXTS[3:]])
    file.sync()
    file.close()
    assert shown(store(path).open()) == shown(TEXTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_mutations(tmp_path: Path) -> None:
    """Of 500 damaged files the texts before the damage are read, and appended to; or one sentence says why none. Fails
    if a digest is not looked at, an error passes, or what is appended stands after what cannot be read.
    """
    path, rng = tmp_path / "store", random.Random(1)
    whole = saved(path)
    ends = np.cumsum([HEADER.size, *(len(record(text)) for text in TEXTS)])
    for number in range(500):
        data = bytearray(whole)
        kind = number % 4
        place = rng.randrange(len(data))
        if kind == 0:
            del data[place:]
        elif kind == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[place : place + rng.randrange(1, 50)] = rng.randbytes(rng.randrange(60))
        else:
            place = len(data)
            data += rng.randbytes(rng.randrange(1, 50))
        path.write_bytes(data)
        file, num_whole = store(path), int(np.searchsorted(ends, place, "right")) - 1
        try:
            texts = file.open()
        except StoreFileError as error:
            assert "\n" not in str(error) and place < HEADER.size
            continue
        assert shown(texts[:num_whole]) == shown(TEXTS[: max(0, num_whole)]) and len(texts) <= len(TEXTS)
        assert all(one == other for one, other in zip(shown(texts), shown(TEXTS), strict=False))
        file.append([record(TEXTS[0])])
        file.close()
        assert shown(store(path).read()) == shown([*texts, TEXTS[0]])


@pytest.mark.parametrize(
    ("mark", "max_bytes", "message"), [(b"x" * 16, 1 << 20, "another tokenizer"), (MARK, 1000, "more than the 1000")]
)
def test_foreign(tmp_path: Path, mark: bytes, max_bytes: int, message: str) -> None:
    """A whole file is refused where it is not for this model. Fails if fingerprint or size are not looked at."""
    saved(tmp_path / "store")
    with pytest.raises(DamagedError, match=message):
        store(tmp_path / "store", mark, max_bytes=max_bytes).open()
    assert [len(text.tokens) for text in store(tmp_path / "store", vocab_size=1).read()] == []


def test_other_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the version is not looked at."""
    with monkeypatch.context() as patched:
        patched.setattr(store_file, "VERSION", 3)
        saved(tmp_path / "store")
    with pytest.raises(DamagedError, match="version 3"):
        store(tmp_path / "store").read()


def test_links(tmp_path: Path) -> None:
    """A link is followed, and stays one; what others put where our files are begun is not touched. Fails if the link is
    replaced by a file, or the victim's file is written to.
    """
    (tmp_path / "real").mkdir()
    link, real, victim = tmp_path / "store", tmp_path / "real" / "file", tmp_path / "victim"
    link.symlink_to(real)
    victim.write_text("mine")
    (tmp_path / "real" / "file.partial").symlink_to(victim)
    saved(link)
    assert link.is_symlink() and shown(store(real).read()) == shown(TEXTS) and victim.read_text() == "mine"
    long = tmp_path / ("ä" * 120)  # a successor has a name that fits, too
    saved(long)
    assert len(store(long).read()) == len(TEXTS)


def test_one_at_a_time(tmp_path: Path) -> None:
    """Who comes second may read; the file is free when the first lets go, or is gone. Fails if it may save, too, or if
    writing anew loses the lock."""
    path = tmp_path / "store"
    first, second = store(path), store(path)
    first.open()
    for _ in range(2):
        first.append([record(TEXTS[0])])
        with pytest.raises(StoreFileError, match="in use by another engine"):
            second.open()
        assert len(second.read()) == 1
        first.write(())
    first.close()
    assert second.open() == []


def test_its_place_is_taken(tmp_path: Path) -> None:
    """Fails if texts are appended for ever to a file that was removed."""
    path = tmp_path / "store"
    file = store(path)
    file.open()
    path.unlink()
    with pytest.raises(OSError):
        file.sync()
    file.close()


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


def test_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of version 0.1.0 wrote the file, with two tenants. Its texts are read, saved in today's form and
    appended to; a full disk leaves it as it is. Kills: texts, an order or a tenant that the upgrade loses; a damaged
    file that is believed.
    """
    data = (Path(__file__).parent / "store_0.1.0.bin").read_bytes()
    _, version, mark = HEADER.unpack_from(data)
    assert version == 1
    path = tmp_path / "store"
    path.write_bytes(data)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(store_file, "write_whole", refuse)
        store(path, mark).open()
    assert path.read_bytes() == data
    read = store(path, mark).read()
    assert [(len(tenant), len(tokens)) for _, tenant, tokens in read] == [(0, 60), (0, 60), (16, 39)]
    assert all(text.in_use for text in read)
    file = store(path, mark)
    assert shown(file.open()) == shown(read)
    file.append([record(TEXTS[0])])
    file.close()
    assert HEADER.unpack_from(path.read_bytes())[1] == store_file.VERSION
    assert shown(store(path, mark).read()) == shown([*read, TEXTS[0]])
    path.write_bytes(data[:100] + b"x" + data[101:])
    with pytest.raises(DamagedError, match="is damaged"):
        store(path, mark).open()


KILLED = """
import sys, numpy as np
from pathlib import Path
from vllm_specplugins.structures.suffix.store_file import StoredText, StoreFile, record
file = StoreFile(Path(sys.argv[1]), b"m" * 16, 1000, 1 << 40)
text = lambda index: StoredText(False, b"", np.full(1000, index % 1000, np.int32))
number = len(file.open())
while True:
    if number % 100 == 99:
        file.write([record(text(index)) for index in range(number)])
    file.append([record(text(number))])
    number += 1
    print(number, flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """A process that is killed anywhere loses nothing that it has appended, 10 times; what it began is cleared away.
    Fails if the file is written anew in its place, or a text waits in memory.
    """
    path, rng, number = tmp_path / "store", random.Random(0), 0
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 300)):
            number = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        number = max([number, *map(int, process.stdout.read().split("\n")[:-1])])
        process.wait()
        process.stdout.close()
        file = store(path, b"m" * 16, max_bytes=1 << 40)
        texts = file.open()
        assert len(texts) in (number, number + 1)
        assert [int(text.tokens[0]) for text in texts] == [index % 1000 for index in range(len(texts))]
        file.write([record(text) for text in texts])
        file.close()
        assert not list(tmp_path.glob(f"*{PARTIAL}"))
