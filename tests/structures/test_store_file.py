"""The store's file: whole or not at all, whatever happens to it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_specplugins.structures import store_file
from vllm_specplugins.structures.store_file import HEADER, StoreFileError, fingerprint, read, record, write

VOCAB_SIZE = 1000
MARK = fingerprint(lambda text: list(text.encode()), VOCAB_SIZE)
TEXTS = [(bytes([65 + i]) * (i % 3), np.arange(i, 5 * i + 3, dtype=np.int32)) for i in range(40)]


def saved(path: Path) -> bytes:
    order = random.Random(0).sample(range(len(TEXTS)), len(TEXTS))
    write(path, MARK, [record(index, *TEXTS[index]) for index in order])
    return path.read_bytes()


def loaded(path: Path, mark: bytes = MARK, vocab_size: int = VOCAB_SIZE, max_bytes: int = 1 << 20):
    return [(tenant, text.tolist()) for tenant, text in read(path, mark, vocab_size, max_bytes)]


def test_round_trip(tmp_path: Path) -> None:
    """What is read is what was written, in order of use, for nobody else to read. Fails if order or mode is another."""
    saved(tmp_path / "store")
    assert loaded(tmp_path / "store") == [(tenant, text.tolist()) for tenant, text in TEXTS]
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_mutations(tmp_path: Path) -> None:
    """500 damaged files are refused in one sentence. Fails if the digest is not looked at, or an error passes."""
    path, rng = tmp_path / "store", random.Random(1)
    whole = saved(path)
    for number in range(500):
        data = bytearray(whole)
        kind = number % 4
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            start = rng.randrange(len(data))
            data[start : start + rng.randrange(1, 50)] = rng.randbytes(rng.randrange(60))
        else:
            data += rng.randbytes(rng.randrange(1, 50))
        if bytes(data) == whole:
            continue
        path.write_bytes(data)
        with pytest.raises(StoreFileError) as caught:
            loaded(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mark", "vocab_size", "max_bytes", "message"),
    [
        (b"x" * 16, VOCAB_SIZE, 1 << 20, "another tokenizer"),
        (MARK, 100, 1 << 20, "damaged"),  # ids that the model does not have
        (MARK, VOCAB_SIZE, 1000, "bytes"),
    ],
)
def test_foreign(tmp_path: Path, mark: bytes, vocab_size: int, max_bytes: int, message: str) -> None:
    """A whole file is refused where it is not for this model. Fails if fingerprint, ids or size are not looked at."""
    saved(tmp_path / "store")
    with pytest.raises(StoreFileError, match=message):
        loaded(tmp_path / "store", mark, vocab_size, max_bytes)


def test_other_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the version is not looked at."""
    with monkeypatch.context() as patched:
        patched.setattr(store_file, "VERSION", 2)
        saved(tmp_path / "store")
    with pytest.raises(StoreFileError, match="version 2"):
        loaded(tmp_path / "store")


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
from vllm_specplugins.structures.store_file import record, write
text = np.arange(1000, dtype=np.int32)
def records():
    for index in range(30_000):
        yield record(index, b"", text)
many = list(records())
print("ready", flush=True)
while True:
    write(Path(sys.argv[1]), b"m" * 16, many)
    print("saved", flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """A process that is killed in the middle of a save loses that save alone. Fails if it writes in place."""
    path = tmp_path / "store"
    whole = saved(path)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    while not (tmp_path / "store.partial").exists():
        time.sleep(0.001)
    time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_bytes() == whole and len(whole) > HEADER.size
    saved(path)  # what is left of the other is no hindrance
    assert len(loaded(path)) == len(TEXTS)
