"""Reads and writes the file of a suffix store: a ring of texts, which are token ids, by tenant. The texts are not
encrypted.

    MAGIC, version, fingerprint of the tokenizer; each text: MARKER, number, whether its tenant is in use, tenant,
    tokens, digest

A text is written after the newest text, or at the beginning if the file may not grow. Nothing else moves, so a killed
process loses no text. Numbers ascend and give the order. A reader searches for markers, and skips texts whose digest is
wrong: damaged or partly overwritten texts.
"""

import errno
import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from vllm_specplugins.structures.whole_file import hold, open_regular

Int32Array = npt.NDArray[np.int32]

MAGIC, VERSION = b"specstor", 3
HEADER = struct.Struct("<8sI16s")
MARKER, PLACE = b"text", struct.Struct("<4sQ")  # no four bytes of token ids are all letters
RECORD = struct.Struct("<BBI")  # is the tenant in use, length of the tenant's name, number of tokens
DIGEST_BYTES, TOKEN_BYTES = 8, 4
# Tokenizers differ in upper case, spaces, digits, punctuation, code, accents, other scripts and emoji.
PROBE = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?\n\n\tdef __init__(self, *args):\r\n        "
    "return {0x1f: 'äöüß', \"naïve\": None}  # Ελληνικά, русский, 日本語, 한국어, العربية, हिन्दी 🙂👩‍💻 <|endoftext|> https://example.org/a?b=c&d"
)


class StoreFileError(ValueError):
    """The file cannot be used; the message is one sentence."""


class DamagedError(StoreFileError):
    """The file is a store that may be replaced: it is damaged, or has another version or tokenizer."""


class StoredText(NamedTuple):
    in_use: bool  # whether its tenant asked again; see store.py
    tenant: bytes
    tokens: Int32Array  # [num_tokens]


def fingerprint(tokenize: Callable[[str], list[int]], vocab_size: int) -> bytes:
    """Returns 16 bytes that are equal for tokenizers which encode PROBE with the same ids, in models of the same
    vocab_size."""
    try:
        ids = tokenize(PROBE)
    except Exception:  # an engine without a tokenizer
        ids = []
    return hashlib.blake2b(np.array([vocab_size, *ids], np.int64).tobytes(), digest_size=16).digest()


def tenant_of(cache_salt: str) -> bytes:
    """Returns the tenant of requests with this `cache_salt`, 16 bytes; callers use b"" for requests without one."""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def record(text: StoredText) -> bytes:
    in_use, tenant, tokens = text
    data = RECORD.pack(in_use, len(tenant), len(tokens)) + tenant + tokens.tobytes()
    return data + _digest(data)


def record_at(data: bytes, start: int, vocab_size: int, number: int = 0) -> tuple[StoredText, int] | None:
    """Returns the text that begins at `start`, and its end; None unless it is complete, with ids in [0, vocab_size)."""
    if len(data) < start + RECORD.size:
        return None
    in_use, num_name, num_tokens = RECORD.unpack_from(data, start)
    begin = start + RECORD.size + num_name
    end = begin + TOKEN_BYTES * num_tokens
    if len(data) < end + DIGEST_BYTES or data[end : end + DIGEST_BYTES] != _digest(data[start:end], number):
        return None
    tokens = np.frombuffer(data, "<i4", num_tokens, begin)
    if num_tokens and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        return None
    return StoredText(bool(in_use), data[begin - num_name : begin], tokens), end + DIGEST_BYTES


def drop_oldest(records: deque[bytes], max_bytes: int) -> None:
    """Drops the oldest records until all of them have at most max_bytes. Other threads may append meanwhile."""
    num_bytes = sum(map(len, tuple(records)))
    while num_bytes > max_bytes:
        num_bytes -= len(records.popleft())


def _digest(data: bytes, number: int = 0) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, salt=number.to_bytes(8, "little")).digest()


class StoreFile:
    """The file of a store, which only one process at a time may open and write. Token ids are in [0, vocab_size),
    `mark` is a `fingerprint`, and the file grows up to max_bytes."""

    def __init__(self, path: Path, mark: bytes, vocab_size: int, max_bytes: int):
        self.path = Path(os.path.realpath(path))
        self._header = HEADER.pack(MAGIC, VERSION, mark)
        self._vocab_size, self._max_bytes = vocab_size, max_bytes
        self._descriptor, self._end, self._number = -1, 0, 0  # place and number of the next text
        self.num_damaged = 0  # texts, when it was read

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def read(self) -> list[StoredText]:
        """Returns the file's texts, oldest first; none if there is no file. Raises StoreFileError if the file is not a
        store, DamagedError if it is an unusable store, and OSError if it cannot be read."""
        try:
            descriptor = open_regular(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            return self._texts(descriptor)
        finally:
            os.close(descriptor)

    def open(self, replaces: bool = False) -> list[StoredText]:
        """Opens or creates the file, and returns its texts as `read` does; empties an unusable store if it `replaces`
        one. Also raises StoreFileError if another process has it open, and OSError if it cannot be written."""
        self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        _held.add(self)
        try:
            with suppress(OSError):  # the file may belong to another user
                os.fchmod(self._descriptor, 0o600)  # independent of the umask
            self._hold()
            try:
                texts = self._texts(self._descriptor)
            except DamagedError:
                if not replaces:
                    raise
                texts = []
            if self._end == 0:
                self.clear()
        except BaseException:
            self.close()
            raise
        return texts

    def clear(self) -> None:
        """Removes all texts from the open file."""
        os.ftruncate(self._descriptor, 0)
        self._write(self._header, 0)
        self._number = 0

    def append(self, data: bytes) -> None:
        """Adds a `record` to the open file. After an OSError, close the file and open it again."""
        if os.pread(self._descriptor, HEADER.size, 0) != self._header:
            raise OSError(errno.ESTALE, "another program emptied or overwrote it")
        data = data[:-DIGEST_BYTES]
        data = PLACE.pack(MARKER, self._number) + data + _digest(data, self._number)
        place = self._end
        if place + len(data) > self._max_bytes:
            os.ftruncate(self._descriptor, place)  # older texts follow if the file was larger before
            place = HEADER.size
        self._write(data, place)
        self._number += 1

    def sync(self) -> None:
        """Waits until the disk has all texts. Raises OSError if that fails, or if the file is gone."""
        os.fsync(self._descriptor)
        self._check_place()

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, data: bytes, place: int) -> None:
        self._end, rest = place + len(data), memoryview(data)
        while rest:
            rest = rest[os.pwrite(self._descriptor, rest, self._end - len(rest)) :]

    def _hold(self) -> None:
        try:
            hold(self._descriptor)
        except BlockingIOError:
            raise StoreFileError(f"the store {self.path} is in use by another engine") from None
        self._check_place()

    def _check_place(self) -> None:
        if not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
            raise FileNotFoundError(2, "another file took its place")

    def _texts(self, descriptor: int) -> list[StoredText]:
        self._end = self._number = self.num_damaged = 0
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            if self._is_empty(file.read(HEADER.size)):
                return []
            file.seek(0)
            data = file.read(os.fstat(descriptor).st_size)
        self._end, texts = HEADER.size, dict[int, StoredText]()
        place = data.find(MARKER, HEADER.size)
        while place >= 0:
            number = int.from_bytes(data[place + len(MARKER) : place + PLACE.size], "little")
            parsed = record_at(data, place + PLACE.size, self._vocab_size, number)
            if parsed is None:
                self.num_damaged, end = self.num_damaged + 1, place + 1
            else:
                texts[number], end = parsed
                if number >= self._number:
                    self._number, self._end = number + 1, end
            place = data.find(MARKER, end)
        return [texts[number] for number in sorted(texts)]

    def _is_empty(self, header: bytes) -> bool:
        """Returns whether the file holds no text and no complete header. Raises errors as `read` does."""
        if not MAGIC.startswith(header[: len(MAGIC)]):
            raise StoreFileError(f"{self.path} is not a store")
        if len(header) < HEADER.size:
            return True
        _, version, mark = HEADER.unpack(header)
        if version != VERSION:
            raise DamagedError(f"the store {self.path} has format version {version}, expected {VERSION}")
        if mark != self._header[-len(mark) :]:
            raise DamagedError(f"the store {self.path} was made with another tokenizer")
        return False


def _let_go() -> None:
    for file in _held:
        file.close()


_held = WeakSet[StoreFile]()  # forked copies of the process close these
os.register_at_fork(after_in_child=_let_go)
