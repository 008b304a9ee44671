"""The file that a suffix store is kept in: texts of token ids by tenant, in one piece or not at all.

    MAGIC, version, fingerprint of the tokenizer, number of texts; each text: when it was used, tenant, tokens; digest

It is written beside and moved, so that a crash loses the new file alone. Whoever can read it can read the texts.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

MAGIC, VERSION = b"specstor", 1
HEADER = struct.Struct("<8sI16sQ")
RECORD = struct.Struct("<IBI")  # used, length of the tenant's name, number of tokens
DIGEST_BYTES = 16
# What tokenizers disagree about: cases, spaces, digits, punctuation, code, accents, other scripts, emoji.
PROBE = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?\n\n\tdef __init__(self, *args):\r\n        "
    "return {0x1f: 'äöüß', \"naïve\": None}  # Ελληνικά, русский, 日本語, 한국어, العربية, हिन्दी 🙂👩‍💻 <|endoftext|> https://example.org/a?b=c&d"
)


class StoreFileError(ValueError):
    """A file that cannot be used; the message is one sentence."""


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


# text: [num_tokens] int32
def record(used: int, tenant: bytes, text: Int32Array) -> bytes:
    """One text as it stands in the file."""
    return RECORD.pack(used, len(tenant), len(text)) + tenant + text.tobytes()


def write(path: Path, mark: bytes, records: Iterable[bytes]) -> None:
    """Writes a file of these records, for nobody else to read. OSError where that fails; the old file is then there."""
    records = list(records)
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for piece in (HEADER.pack(MAGIC, VERSION, mark, len(records)), *records):
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read(path: Path, mark: bytes, vocab_size: int, max_bytes: int) -> list[tuple[bytes, Int32Array]]:
    """Tenant and tokens of each text, the one used longest ago first.

    Raises:
        StoreFileError: it is no such file, damaged, of another version or tokenizer, or larger than max_bytes.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise StoreFileError(f"the store {path} has {size} bytes, where at most {max_bytes} are allowed")
    data = path.read_bytes()
    if len(data) < HEADER.size + DIGEST_BYTES or data[: len(MAGIC)] != MAGIC:
        raise StoreFileError(f"{path} is no store")
    _, version, its_mark, num_texts = HEADER.unpack_from(data)
    if version != VERSION:
        raise StoreFileError(f"the store {path} is of version {version}, where {VERSION} is needed")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise StoreFileError(f"the store {path} is damaged")
    if its_mark != mark:
        raise StoreFileError(f"the store {path} was made with another tokenizer")
    try:
        texts = sorted(_texts(body, num_texts, vocab_size), key=lambda text: text[0])
    except (ValueError, struct.error):
        raise StoreFileError(f"the store {path} is damaged") from None
    return [(tenant, text) for _, tenant, text in texts]


def _texts(body: bytes, num_texts: int, vocab_size: int) -> list[tuple[int, bytes, Int32Array]]:
    texts, start = [], HEADER.size
    for _ in range(num_texts):
        used, num_name, num_tokens = RECORD.unpack_from(body, start)
        start += RECORD.size
        name = body[start : start + num_name]
        start += num_name
        text = np.frombuffer(body, "<i4", num_tokens, start)
        start += text.nbytes
        if num_tokens and not 0 <= text.min() <= text.max() < vocab_size:
            raise ValueError
        texts.append((used, name, text))
    if start != len(body):
        raise ValueError
    return texts
