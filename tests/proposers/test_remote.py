"""Another server as the drafter: a real HTTP server that knows a text, is late, or hostile; docstrings say when a test
fails."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.methods import parse_config
from vllm_specplugins.proposers import remote
from vllm_specplugins.proposers.remote import Remote

sys.path.append(str(Path(__file__).parent))

from suffix_play import TEXT, K, step, wait_for

VOCAB_SIZE = 1000
Answer = tuple[int, dict[str, str], Iterable[bytes]]


def known(question: dict[str, Any]) -> bytes:
    """What follows the prompt in TEXT, as vLLM answers it."""
    start, count = len(question["prompt"]), question["max_tokens"]
    return json.dumps({"choices": [{"text": "", "token_ids": TEXT[start : start + count].tolist()}]}).encode()


class Drafter:
    """A server whose answers are scripted; keeps what it was asked."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds, for pauses
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any]], Answer] = lambda question: (200, {}, [known(question)])
        self.may_answer = threading.Event()
        self.may_answer.set()
        drafter = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                drafter.questions.append({**question, "path": self.path})
                drafter.headers.append(dict(self.headers))
                drafter.may_answer.wait(60)
                status, headers, parts = drafter.answer(question)
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for part in parts:
                        self.wfile.write(part)
                except OSError:  # who asked went away
                    pass

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafter]:
    own = Drafter()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: own.now))
    yield own
    own.close()


@pytest.fixture
def make(drafter: Drafter) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def of(**config: Any) -> Remote:
        parsed = parse_config({"method": "remote", "url": drafter.url, "model": "m", **config})
        made.append(Remote(parsed.own, ProposerContext(VOCAB_SIZE, 1 << 20, 8, K, tokenize=lambda text: [1])))
        return made[-1]

    yield of
    for own in made:
        own.close()


def drafted(own: Remote, text: np.ndarray, name: str = "a") -> list[int]:
    [draft] = step(own, {name: text})
    return list(draft)


def until(own: Remote, text: np.ndarray) -> list[int]:
    """Steps without a new token until there is a draft."""
    drafts: list[list[int]] = []
    wait_for(lambda: drafts.append(drafted(own, text)) or drafts[-1])
    return drafts[-1]


def test_asked_ahead(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A request that goes on as guessed always has a whole draft; what is asked goes on from the guess, one question
    at a time, and the likeliest tokens are asked for.

    Kills: a question about the history alone, whose answer the next step has outrun; a second question beside one
    that is under way; a draft from the wrong place of the guess.
    """
    own, place = make(), 20
    until(own, TEXT[:20])
    while place < 250:
        draft = drafted(own, TEXT[:place])
        assert draft == TEXT[place : place + len(draft)].tolist()
        wait_for(lambda: len(drafted(own, TEXT[:place])) == K)  # noqa: B023
        place += K + 1
    assert {question["temperature"] for question in drafter.questions} == {0}
    assert all(question["prompt"] == TEXT[: len(question["prompt"])].tolist() for question in drafter.questions)
    starts = [len(question["prompt"]) for question in drafter.questions]
    ends = [
        min(start + question["max_tokens"], len(TEXT))
        for start, question in zip(starts, drafter.questions, strict=True)
    ]
    assert starts[1:] == ends[:-1] and len(starts) > 5
    assert own.exchange_stats()["dropped"] == 0


def test_late_answer(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A step does not wait; of an answer that comes three tokens late what still fits is drafted.

    Kills: a step that waits; a late answer that is dropped, or drafted from its beginning.
    """
    own = make()
    drafter.may_answer.clear()
    for length in range(20, 24):
        assert drafted(own, TEXT[:length]) == []
    drafter.may_answer.set()
    assert until(own, TEXT[:23]) == TEXT[23:28].tolist()
    assert own.exchange_stats() == {"asked": 2, "answered": 1, "dropped": 0, "failed": 0}


def test_wrong_guess(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """Where the history goes on otherwise the guess and its question are dropped, and what really stands there is asked
    about; requests do not share anything.

    Kills: a guess that is kept; an answer to a dropped question that is drafted.
    """
    own = make()
    until(own, TEXT[:20])
    drafter.may_answer.clear()
    drafted(own, TEXT[:22])
    other = np.append(TEXT[:22], np.int32(7))
    assert drafted(own, other) == [] and own.exchange_stats()["dropped"] == 1
    drafter.may_answer.set()
    wait_for(lambda: drafter.questions[-1]["prompt"] == other.tolist())
    assert until(own, other) == TEXT[23:28].tolist()
    assert drafted(own, TEXT[:40], "b") == []
    own.forget(["a", "b", "nobody"])
    assert own._guesses == {}


def endless() -> Iterator[bytes]:
    while True:
        yield b" " * 10_000
        time.sleep(0.001)


def answer_of(tokens: Any) -> bytes:
    return json.dumps({"choices": [{"token_ids": tokens}]}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, [b"{}"]),
        (404, {}, [b"x" * 100_000]),
        (200, {}, [b"no JSON"]),
        (200, {}, [b"[" * 100_000]),
        (200, {}, [b"{}"]),
        (200, {}, [answer_of(None)]),
        (200, {}, [answer_of([VOCAB_SIZE])]),
        (200, {}, [answer_of([-1])]),
        (200, {}, [answer_of([True, 1.0, "1"])]),
        (200, {"Content-Length": "100"}, [b"x"]),
        (200, {"Content-Encoding": "gzip"}, [b"x" * 1000]),
        (200, {}, (b" " * 1_000_000 for _ in range(100))),
        (200, {}, endless()),
        (307, {"Location": "/elsewhere"}, []),
    ],
    ids=lambda answer: f"{answer[0]}",
)
def test_hostile(
    drafter: Drafter, make: Callable[..., Remote], answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no answer costs that draft, is counted, and is said once; then the server is given a pause; when it
    answers as it should there are drafts again.

    Kills: an exception in a step; a redirect that is followed; an answer that is read without end; ids past the
    vocabulary; a line for each failure.
    """
    caplog.set_level(logging.INFO, "vllm.specplugins")
    own = make()
    good, drafter.answer = drafter.answer, lambda question: answer
    lengths = iter(range(20, 300))
    wait_for(lambda: drafted(own, TEXT[: next(lengths)]) == [] and own.exchange_stats()["failed"] > 0)
    assert caplog.text.count("no drafts from") == 1 and {question["path"] for question in drafter.questions} == {
        "/v1/completions"
    }
    num_asked = len(drafter.questions)
    for _ in range(50):
        assert drafted(own, TEXT[: next(lengths)]) == []
    assert len(drafter.questions) == num_asked
    drafter.answer, drafter.now = good, remote.FIRST_PAUSE_S
    wait_for(lambda: drafted(own, TEXT[: next(lengths)]) or time.sleep(0.05))
    assert caplog.text.count("answers again") == 1


def test_server_away(drafter: Drafter, make: Callable[..., Remote], caplog: pytest.LogCaptureFixture) -> None:
    """A server that ends costs its drafts and one line. Kills: a connection error in a step."""
    own = make()
    until(own, TEXT[:20])
    drafter._server.shutdown()
    drafter._server.server_close()
    for length in range(21, 40):
        drafted(own, TEXT[:length])
        time.sleep(0.02)
    wait_for(lambda: drafted(own, TEXT[:41]) == [] and own.exchange_stats()["failed"] > 0)
    assert caplog.text.count("no drafts from") == 1


def test_key(
    drafter: Drafter, make: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key goes with each question, and nowhere else. Kills: a line that has it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("DRAFTER_KEY", "secret")
    own = make(api_key_env="DRAFTER_KEY")
    until(own, TEXT[:20])
    assert drafter.headers[0]["Authorization"] == "Bearer secret" and "secret" not in caplog.text


@pytest.mark.parametrize(
    "field, value",
    [
        ("url", "localhost:8000"),
        ("url", "http://me:secret@host/v1"),
        ("url", "http://host:x"),
        ("url", None),
        ("model", ""),
        ("api_key_env", "NOT_THERE"),
        ("api_key_env", 5),
    ],
)
def test_refused(field: str, value: Any) -> None:
    """What cannot be asked is refused by name. Kills: a check that passes any text."""
    with pytest.raises(ConfigError, match=f"remote: {field} must be"):
        parse_config({"method": "remote", "url": "http://host/v1", "model": "m", field: value})
