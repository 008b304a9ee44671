"""The file that a suffix store is kept in: texts of token ids by tenant, each with a digest of its own.

    MAGIC, version, fingerprint of the tokenizer; each text: whether its tenant is in use, tenant, tokens, digest

Texts are appended as they come, so that a process that is killed loses none; what was not written whole is dropped when
the file is read. Where it has grown too long it is written anew, beside, and moved. Whoever can read it can read the
texts.
"""

import glob
import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specplugins.structures.whole_file import (
    hold,
    open_regular,
    prefix_of,
    read_all,
    read_regular,
    write_all,
    write_whole,
)

Int32Array = npt.NDArray[np.int32]

MAGIC, VERSION = b"specstor", 2
HEADER = struct.Struct("<8sI16s")
RECORD = struct.Struct("<BBI")  # whether the tenant is in use, length of the tenant's name, number of tokens
DIGEST_BYTES, TOKEN_BYTES = 8, 4
# What tokenizers disagree about: cases, spaces, digits, punctuation, code, accents, other scripts, emoji.
PROBE = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?\n\n\tdef __init__(self, *args):\r\n        "
    "return {0x1f: 'äöüß', \"naïve\": None}  # Ελληνικά, русский, 日本語, 한국어, العربية, हिन्दी 🙂👩‍💻 <|endoftext|> https://example.org/a?b=c&d"
)


class StoreFileError(ValueError):
    """A file that cannot be used; the message is one sentence."""


class DamagedError(StoreFileError):
    """The same of one that may be replaced: a store, but damaged, too large, or of another version or tokenizer."""


class StoredText(NamedTuple):
    """One text of a file."""

    in_use: bool  # whether its tenant asked again; see store.py
    tenant: bytes
    tokens: Int32Array  # [num_tokens]


def fingerprint(tokenize: Callable[[str], list[int]], vocab_size: int) -> bytes:
    """16 bytes that tokenizers have in common which give PROBE the same ids, for models of this size."""
    try:
        ids = tokenize(PROBE)
    except Exception:  # an engine without a tokenizer
        ids = []
    return hashlib.blake2b(np.array([vocab_size, *ids], np.int64).tobytes(), digest_size=16).digest()


def tenant_of(cache_salt: str) -> bytes:
    """What names a tenant, 16 bytes, by the `cache_salt` of its requests; those without one are b""."""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def record(text: StoredText) -> bytes:
    """One text as it stands in the file."""
    in_use, tenant, tokens = text
    data = RECORD.pack(in_use, len(tenant), len(tokens)) + tenant + tokens.tobytes()
    return data + _digest(data)


def record_at(data: bytes, start: int, vocab_size: int) -> tuple[StoredText, int] | None:
    """The record that begins there, and where it ends; None unless it is whole, with token ids in [0, vocab_size)."""
    if len(data) < start + RECORD.size:
        return None
    in_use, num_name, num_tokens = RECORD.unpack_from(data, start)
    begin = start + RECORD.size + num_name
    end = begin + 4 * num_tokens
    if len(data) < end + DIGEST_BYTES or data[end : end + DIGEST_BYTES] != _digest(data[start:end]):
        return None
    tokens = np.frombuffer(data, "<i4", num_tokens, begin)
    if num_tokens and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        return None
    return StoredText(bool(in_use), data[begin - num_name : begin], tokens), end + DIGEST_BYTES


def drop_oldest(records: deque[bytes], max_bytes: int) -> None:
    """Gives up the oldest records where all of them have more bytes."""
    num_bytes = sum(map(len, records))
    while num_bytes > max_bytes:
        num_bytes -= len(records.popleft())


class StoreFile:
    """See the module. One process at a time writes to a file, while it has it open.

    Args:
        path: where it is, or a link to that.
        mark: see fingerprint.
        vocab_size: its token ids are in [0, vocab_size).
        max_bytes: larger ones are refused.
    """

    def __init__(self, path: Path, mark: bytes, vocab_size: int, max_bytes: int):
        self.path, self._mark = Path(os.path.realpath(path)), mark
        self._vocab_size, self._max_bytes = vocab_size, max_bytes
        self._descriptor = -1
        self.num_bytes = 0
        self.num_dropped = 0  # bytes that were not whole when it was opened

    @property
    def is_open(self) -> bool:
        """Whether texts can be appended."""
        return self._descriptor >= 0

    def read(self) -> list[StoredText]:
        """Its texts, the oldest first, as far as they are whole; none where there is no file.

        Raises:
            StoreFileError: it is no store; DamagedError: it is one that cannot be used.
            OSError: it cannot be read.
        """
        try:
            data = read_regular(self.path, self._max_bytes + 1)
        except FileNotFoundError:
            return []
        return self._parsed(data)[0]

    def open(self) -> list[StoredText]:
        """Takes hold of the file, a new one if need be, and cuts off what is not whole; see read.

        Raises:
            StoreFileError: see read; or another process holds it.
            OSError: it cannot be written.
        """
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._lock(descriptor)
            data = read_all(descriptor, self._max_bytes + 1)
            texts, end = self._parsed(data)
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
            if end == 0:
                write_all(descriptor, self._header)
        except BaseException:
            os.close(descriptor)
            raise
        for partial in self.path.parent.glob(glob.escape(prefix_of(self.path)) + "*.partial"):
            partial.unlink(missing_ok=True)  # of a process that was killed
        self._descriptor, self.num_bytes = descriptor, max(end, HEADER.size)
        self.num_dropped = len(data) - end
        return texts

    def append(self, records: Iterable[bytes]) -> None:
        """Adds these to an open file. OSError where that fails: the file is then closed."""
        try:
            data = b"".join(records)
            write_all(self._descriptor, data)
            self.num_bytes += len(data)
        except BaseException:
            self.close()
            raise

    def sync(self) -> None:
        """Waits until what was appended is on the disk. OSError where that fails, or the file is gone: it is closed."""
        try:
            os.fsync(self._descriptor)
            self._check_place(self._descriptor)
        except BaseException:
            self.close()
            raise

    def write(self, records: Iterable[bytes]) -> None:
        """Writes a file of these records alone, and holds it. OSError where that fails; the old one is then there."""
        data = self._header + b"".join(records)
        descriptor = write_whole(self.path, data)
        self.close()
        self._descriptor, self.num_bytes = descriptor, len(data)
        self._lock(descriptor)

    def shorten(self, num_bytes: int) -> None:
        """Writes an open file anew with its last texts, so many bytes of them, if it has more than twice that."""
        if self.num_bytes > 2 * num_bytes:
            data, place = read_all(self._descriptor, self.num_bytes), HEADER.size
            while len(data) - place > num_bytes:
                _, num_name, num_tokens = RECORD.unpack_from(data, place)
                place += RECORD.size + num_name + 4 * num_tokens + DIGEST_BYTES
            self.write([data[place:]])

    def close(self) -> None:
        """Lets go of the file."""
        if self.is_open:
            os.close(self._descriptor)
        self._descriptor = -1

    @property
    def _header(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self._mark)

    def _lock(self, descriptor: int) -> None:
        try:
            hold(descriptor)
        except BlockingIOError:
            raise StoreFileError(f"the store {self.path} is another engine's, which saves to it") from None
        self._check_place(descriptor)

    def _check_place(self, descriptor: int) -> None:
        if not os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
            raise FileNotFoundError(2, "another file took its place")

    def _parsed(self, data: bytes) -> tuple[list[StoredText], int]:
        """The texts that are whole, and where they end."""
        if not data:
            return [], 0
        if data[: len(MAGIC)] != MAGIC:
            raise StoreFileError(f"{self.path} is no store")
        if len(data) > self._max_bytes:
            raise DamagedError(f"the store {self.path} has more than the {self._max_bytes} bytes that are allowed")
        if len(data) < HEADER.size:
            raise DamagedError(f"the store {self.path} is damaged")
        _, version, mark = HEADER.unpack_from(data)
        if version != VERSION:
            raise DamagedError(f"the store {self.path} is of version {version}, where {VERSION} is needed")
        if mark != self._mark:
            raise DamagedError(f"the store {self.path} was made with another tokenizer")
        texts, end = [], HEADER.size
        while (found := record_at(data, end, self._vocab_size)) is not None:
            text, end = found
            texts.append(text)
        return texts, end


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
