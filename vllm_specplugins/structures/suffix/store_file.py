"""The file of a suffix store: texts of token ids by tenant, each with a digest. The texts are not encrypted.

    MAGIC, version, fingerprint of the tokenizer; each text: whether its tenant is in use, tenant, tokens, digest

Texts are appended one by one, so a killed process loses none of them. Opening the file drops an incomplete text at its
end. A file that has grown too long is replaced as a whole, and so is a file of version 1, with the same texts:

    MAGIC, version, fingerprint, number of texts; each text: when it was last used, tenant, tokens; one digest
"""

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specplugins.structures.whole_file import (
    hold,
    open_regular,
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
V1_HEADER, V1_RECORD, V1_DIGEST_BYTES = struct.Struct("<8sI16sQ"), struct.Struct("<IBI"), 16
# Tokenizers disagree about cases, spaces, digits, punctuation, code, accents, other scripts and emoji.
PROBE = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?\n\n\tdef __init__(self, *args):\r\n        "
    "return {0x1f: 'äöüß', \"naïve\": None}  # Ελληνικά, русский, 日本語, 한국어, العربية, हिन्दी 🙂👩‍💻 <|endoftext|> https://example.org/a?b=c&d"
)


class StoreFileError(ValueError):
    """The file cannot be used; the message is one sentence."""


class DamagedError(StoreFileError):
    """The file may be replaced: it is a store, but damaged, too large, or of another version or tokenizer."""


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


def record_at(data: bytes, start: int, vocab_size: int) -> tuple[StoredText, int] | None:
    """Returns the text that begins at `start`, and its end; None unless it is complete, with ids in [0, vocab_size)."""
    parsed = _text_at(RECORD, data, start, vocab_size)
    if parsed is None or data[parsed[2] : parsed[2] + DIGEST_BYTES] != _digest(data[start : parsed[2]]):
        return None
    in_use, text, end = parsed
    return text._replace(in_use=bool(in_use)), end + DIGEST_BYTES


def _texts_of_version_1(data: bytes, vocab_size: int) -> list[StoredText] | None:
    """Returns the texts, the one that was used longest ago first; None if the file is damaged."""
    body, digest = data[:-V1_DIGEST_BYTES], data[-V1_DIGEST_BYTES:]
    if digest != _digest(body, V1_DIGEST_BYTES):
        return None
    texts, start = list[tuple[int, StoredText]](), V1_HEADER.size
    while (parsed := _text_at(V1_RECORD, body, start, vocab_size)) is not None:
        last_used, text, start = parsed
        texts.append((last_used, text))
    return [text for _, text in sorted(texts, key=itemgetter(0))]


def _text_at(form: struct.Struct, data: bytes, start: int, vocab_size: int) -> tuple[int, StoredText, int] | None:
    """Returns the first field of the record at `start`, its text and the text's end, or None as record_at does."""
    if len(data) < start + form.size:
        return None
    first, num_name, num_tokens = form.unpack_from(data, start)
    begin = start + form.size + num_name
    end = begin + TOKEN_BYTES * num_tokens
    if len(data) < end:
        return None
    tokens = np.frombuffer(data, "<i4", num_tokens, begin)
    if num_tokens and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        return None
    return first, StoredText(True, data[begin - num_name : begin], tokens), end


def drop_oldest(records: deque[bytes], max_bytes: int) -> None:
    """Drops the oldest records until all of them have at most max_bytes. Other threads may append meanwhile."""
    num_bytes = sum(map(len, tuple(records)))
    while num_bytes > max_bytes:
        num_bytes -= len(records.popleft())


def _digest(data: bytes, num_bytes: int = DIGEST_BYTES) -> bytes:
    return hashlib.blake2b(data, digest_size=num_bytes).digest()


class StoreFile:
    """A store's file, which only one process at a time may open and write. Token ids are in [0, vocab_size), `mark` is
    a `fingerprint`, and files larger than max_bytes are refused."""

    def __init__(self, path: Path, mark: bytes, vocab_size: int, max_bytes: int):
        self.path = Path(os.path.realpath(path))
        self._header, self._v1_header = (HEADER.pack(MAGIC, version, mark) for version in (VERSION, 1))
        self._vocab_size, self._max_bytes = vocab_size, max_bytes
        self._descriptor = -1
        self.num_dropped = 0  # damaged bytes at its end, when it was opened

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def read(self) -> list[StoredText]:
        """Returns the file's complete texts, oldest first; none if there is no file. Raises StoreFileError if the file
        is not a store, DamagedError if it is an unusable store, and OSError if it cannot be read."""
        try:
            return self._parsed(read_regular(self.path, self._max_bytes + 1))[0]
        except FileNotFoundError:
            return []

    def open(self) -> list[StoredText]:
        """Opens or creates the file, cuts off a damaged end, and returns its texts as `read` does. Also raises
        StoreFileError if another process has it open, and OSError if it cannot be written."""
        self._descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._hold()
            data = read_all(self._descriptor, self._max_bytes + 1)
            texts, end = self._parsed(data)
            if data.startswith(self._v1_header):
                self.write(map(record, texts))
            else:
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
            if end == 0:
                write_all(self._descriptor, self._header)
        except BaseException:
            self.close()
            raise
        self.num_dropped = len(data) - end
        return texts

    def append(self, records: Iterable[bytes]) -> None:
        """Adds records to the open file. After an OSError, close the file and open it again."""
        write_all(self._descriptor, b"".join(records))

    def sync(self) -> None:
        """Waits until the disk has all appended records. Raises OSError if that fails, or if the file is gone."""
        os.fsync(self._descriptor)
        self._check_place()

    def write(self, records: Iterable[bytes]) -> None:
        """Replaces the file with one that holds these records, and opens it. If that fails, it raises OSError, and the
        old file stays."""
        descriptor = write_whole(self.path, self._header + b"".join(records))
        self.close()
        self._descriptor = descriptor
        self._hold()

    def shorten(self, num_bytes: int) -> None:
        """Replaces the open file by its last texts, up to num_bytes, if it is more than twice as large."""
        size = os.fstat(self._descriptor).st_size
        if size > 2 * num_bytes:
            data, place = read_all(self._descriptor, size), HEADER.size
            while len(data) - place > num_bytes:
                _, num_name, num_tokens = RECORD.unpack_from(data, place)
                place += RECORD.size + num_name + TOKEN_BYTES * num_tokens + DIGEST_BYTES
            self.write([data[place:]])

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
        self._descriptor = -1

    def _hold(self) -> None:
        try:
            hold(self._descriptor)
        except BlockingIOError:
            raise StoreFileError(f"the store {self.path} is in use by another engine") from None
        self._check_place()

    def _check_place(self) -> None:
        if not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
            raise FileNotFoundError(2, "another file took its place")

    def _parsed(self, data: bytes) -> tuple[list[StoredText], int]:
        if not data:
            return [], 0
        if data[: len(MAGIC)] != MAGIC:
            raise StoreFileError(f"{self.path} is not a store")
        if len(data) > self._max_bytes:
            raise DamagedError(f"the store {self.path} has more than the {self._max_bytes} bytes that are allowed")
        if len(data) < HEADER.size:
            raise DamagedError(f"the store {self.path} is damaged")
        version = HEADER.unpack_from(data)[1]
        if version not in (1, VERSION):
            raise DamagedError(f"the store {self.path} is of version {version}, where {VERSION} is needed")
        if not data.startswith((self._header, self._v1_header)):
            raise DamagedError(f"the store {self.path} was made with another tokenizer")
        if version == 1:
            if (former := _texts_of_version_1(data, self._vocab_size)) is None:
                raise DamagedError(f"the store {self.path} is damaged")
            return former, len(data)
        texts, end = list[StoredText](), HEADER.size
        while (parsed := record_at(data, end, self._vocab_size)) is not None:
            text, end = parsed
            texts.append(text)
        return texts, end
