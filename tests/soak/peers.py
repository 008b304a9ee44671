"""Probes of what an engine reads from others: a store's file, entries and answers of a Redis server, and answers of a
drafter's server. Each yields None, or a problem in words."""

import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.remote.proposer import Remote
from vllm_specplugins.structures.suffix.shared import ORIGIN, TEXT, SharedTexts
from vllm_specplugins.structures.suffix.store_file import (
    StoredText,
    StoreFile,
    StoreFileError,
    fingerprint,
    record,
    record_at,
)

Problems = Iterator[str | None]
VOCAB_SIZE, K = 1000, 4
MARK = fingerprint(lambda text: list(text.encode()), VOCAB_SIZE)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A part of it flipped, cut, repeated, moved, emptied, grown, or nothing of the kind left."""
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    other = rng.randrange(len(data) + 1)
    part = data[start : min(end, start + 200)]
    return rng.choice(
        [
            lambda: data[:start] + bytes([data[start - 1] ^ (1 << rng.randrange(8))]) + data[start + 1 :],
            lambda: data[:start],
            lambda: data[:start] + data[end:],
            lambda: data[:other] + part + data[other:],
            lambda: data[:start] + bytes(len(part)) + data[start + len(part) :],
            lambda: data[:start] + rng.randbytes(rng.randrange(60)) + data[start:],
            lambda: data[start:] + data[:start],
            lambda: rng.randbytes(rng.randrange(300)),
            lambda: data + data,
        ]
    )()


def some_text(rng: random.Random) -> StoredText:
    """The tenant's name tells which tokens are his."""
    number = rng.randrange(90)
    return StoredText(
        bool(rng.randrange(2)), bytes([number]) * (number % 4), np.full(rng.randrange(1, 40), number, np.int32)
    )


def shown(text: StoredText) -> tuple[bytes, tuple[int, ...]]:
    return text.tenant, tuple(text.tokens.tolist())


def stores(rng: random.Random, count: int) -> Problems:
    """Whatever happened to a file, each text of it is one that was saved, for its tenant; the next save is read again,
    or a sentence says why not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        for _ in range(count):
            path.unlink(missing_ok=True)
            file, saved = StoreFile(path, MARK, VOCAB_SIZE, rng.choice([300, 2000, 1 << 20])), set[Any]()
            file.open()
            for _ in range(rng.randrange(1, 30)):
                text = some_text(rng)
                saved.add(shown(text))
                file.append(record(text))
            file.close()
            for _ in range(rng.randrange(1, 4)):
                path.write_bytes(damaged(rng, path.read_bytes() or b"x"))
            yield _problem_of_store(rng, path, saved)


def _problem_of_store(rng: random.Random, path: Path, saved: set[Any]) -> str | None:
    again = StoreFile(path, MARK, VOCAB_SIZE, 1 << rng.randrange(10, 20))
    try:
        texts = list(map(shown, again.open(replaces=bool(rng.randrange(2)))))
        if not saved.issuperset(texts):
            return f"texts that nobody saved: {set(texts) - saved}"
        text = some_text(rng)
        again.append(record(text))
        again.close()
        if list(map(shown, StoreFile(path, MARK, VOCAB_SIZE, 1 << 20).read()))[-1] != shown(text):
            return "what was saved last is not there, or not last"
    except StoreFileError as error:
        return "a sentence of several lines" if "\n" in str(error) else None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        again.close()
    return None


def entries(rng: random.Random, count: int) -> Problems:
    """Of bytes of an entry a text comes that was published, or none."""
    for _ in range(count):
        text = some_text(rng)
        data = damaged(rng, record(text))
        try:
            found = record_at(data, 0, VOCAB_SIZE)
            yield None if found is None or shown(found[0]) == shown(text) else f"{found[0]} of {data!r}"
        except BaseException as error:
            yield f"{type(error).__name__}: {error} of {data!r}"


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that answers each connection in a thread."""

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(5)
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as own:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(own.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield own.getsockname()[1]


def _bulk(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _reply(rng: random.Random, command: bytes) -> bytes:
    """What a server might answer, mostly damaged."""
    good = b":1\r\n"
    if b"TIME" in command:
        good = _bulk(b"%d" % time.time(), b"0")
    elif b"XREAD" in command:
        place = b"%d-%d" % (rng.choice([1, 1000 * time.time(), 1 << 62, -1]), rng.randrange(9))
        text = record(some_text(rng))
        fields = _bulk(TEXT, rng.choice([text, damaged(rng, text), b""]), ORIGIN, rng.choice([b"them", b"", b"x" * 99]))
        good = b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$%d\r\n%s\r\n%s" % (len(place), place, fields)
    kinds = [lambda: good] * 4 + [lambda: damaged(rng, good)] * 4
    odd = [b"-ERR \x1b[31m\r\n", b"-MOVED 1 h:1\r\n", b"*-1\r\n", b"$-1\r\n", b"$999999999999\r\n", b"*999999999\r\n"]
    odd += [
        b":" + b"9" * 5000 + b"\r\n",
        b"*1\r\n" * 300,
        b"",
        b"_\r\n",
        b"%1\r\n+a\r\n:1\r\n",
        b"+OK\r\n",
        b",nan\r\n",
    ]
    return rng.choice([*kinds, lambda: rng.choice(odd)])()


def servers(rng: random.Random, count: int) -> Problems:
    """Whatever a Redis server answers, an exchange ends without an exception, in its time; its texts are whole."""
    ends = threading.Event()

    def answer(connection: socket.socket) -> None:
        while not ends.is_set() and (command := connection.recv(1 << 16)):
            connection.sendall(_reply(rng, command))
            if rng.random() < 0.3:
                return

    with listening(answer) as port:
        for _ in range(count):
            own = SharedTexts(f"redis://127.0.0.1:{port}?protocol={rng.choice([2, 3])}", b"m", VOCAB_SIZE, 1000, 100)
            own._server.connection_pool.connection_kwargs["socket_timeout"] = 0.05
            own.add(some_text(rng))
            began, problem = time.monotonic(), None
            try:
                own._attempt(1.0)
                for text in own._waiting:
                    name = text.tenant[:1]
                    if len(set(text.tokens.tolist())) > 1 or (name and set(text.tokens.tolist()) != {name[0]}):
                        problem = f"a text that nobody published: {text}"
            except BaseException as error:
                problem = f"{type(error).__name__}: {error}"
            own._server.close()
            yield problem or ("an exchange of more than 3 s" if time.monotonic() - began > 3 else None)
    ends.set()


def _pieces(rng: random.Random) -> bytes:
    """An answer of a drafter's server, in events; wrong in one way or another."""
    odd: list[Any] = [None, True, -1, VOCAB_SIZE, 1 << 70, 1.5, "7", [], {}, "\ud800", [[1]], float("nan")]
    lines = []
    for _ in range(rng.randrange(6)):
        ids: Any = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]
        if rng.random() < 0.3:
            ids = rng.choice([[*ids, rng.choice(odd)], rng.choice(odd)])
        choice: Any = rng.choice([{"token_ids": ids, "text": "x"}] * 4 + [{"text": "x"}, ids])
        event: Any = rng.choice([{"choices": [choice]}] * 5 + [{"choices": choice}, [choice], {}, {"choices": []}])
        lines.append(rng.choice([b"data: "] * 8 + [b"data:", b"event: ", b""]) + json.dumps(event).encode() + b"\n\n")
    body = b"".join([*lines, rng.choice([b"data: [DONE]\n\n", b"", b"data: {", b": x\n"])])
    return damaged(rng, body) if body and rng.random() < 0.3 else body


def _http(rng: random.Random) -> bytes:
    body = _pieces(rng)
    status = rng.choice(
        [b"200 OK"] * 8 + [b"204 No", b"301 Moved\r\nLocation: /x", b"400 No", b"500 No", b"999 x", b"x"]
    )
    head = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n"
    length = rng.choice([len(body)] * 6 + [len(body) + 9, -1, 1 << 60])
    kind = rng.randrange(8)
    if kind == 0:
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + (damaged(rng, chunks) if rng.randrange(2) else chunks)
    if kind == 1:
        return damaged(rng, head + b"\r\n" + body)
    return head + b"Content-Length: %d\r\n\r\n" % length + body


def drafters(rng: random.Random, count: int) -> Problems:
    """Whatever a drafter's server answers, a step gets ids of the vocabulary, without an exception, and at once."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(_http(rng))

    with listening(answer) as port:
        config = parse_config({"method": "remote", "url": f"http://127.0.0.1:{port}/v1", "model": "m"})
        own: Any = Remote(config.method_config, ProposerContext(VOCAB_SIZE, 1 << 20, 8, K, lambda text: [1]))
        for number in range(count):
            own._server._not_before, own._server._max_model_len = 0.0, 100  # no pause, no list of models
            histories, problem, name = [np.arange(9, dtype=np.int32)], None, f"{number}"
            batch, until = DraftBatch([name], histories, np.full(1, K, np.int32), [{}]), time.monotonic() + 2
            try:
                while time.monotonic() < until:
                    began = time.monotonic()
                    draft = own.propose(batch)
                    ids = draft.token_ids[0, : draft.num_draft[0]].tolist()
                    if time.monotonic() - began > 0.5:
                        problem = "a step waits"
                    if len(ids) > K or not all(0 <= token < VOCAB_SIZE for token in ids):
                        problem = f"drafts {ids}"
                    if own.counts["asked"] == own.counts["answered"] + own.counts["failed"] + own.counts["dropped"]:
                        break
                    time.sleep(0.001)
                own.forget([name])
            except BaseException as error:
                problem = f"{type(error).__name__}: {error}"
            yield problem
        own.close()


PEERS = {"stores": stores, "entries": entries, "servers": servers, "drafters": drafters}
