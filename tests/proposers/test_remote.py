"""Another server as the drafter: a real HTTP server that knows a text, is late, or hostile; docstrings say when a test
fails."""

import functools
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
from transformers import AutoTokenizer

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.engine.codec import TextCodec
from vllm_specplugins.methods import has_tenants
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.remote import server
from vllm_specplugins.proposers.remote.proposer import MAX_ASKED, Remote
from vllm_specplugins.structures.pause import FIRST_PAUSE_S

sys.path.append(str(Path(__file__).parent))

from suffix_play import TEXT, K, step, wait_for

VOCAB_SIZE = 1000
CODE = (Path(json.__file__).read_text()[:3000] + "naïve 漢字 😀 = '😀😀'\n" * 20).encode()
Answer = tuple[int, dict[str, str], Iterable[bytes]]


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def known(question: dict[str, Any]) -> Iterator[bytes]:
    """What follows the prompt in TEXT, two tokens at a time, as vLLM answers it."""
    start = len(question["prompt"])
    for place in range(start, start + question["max_tokens"], 2):
        yield event(text="", token_ids=TEXT[place : min(place + 2, start + question["max_tokens"])].tolist())
    yield b"data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    request_queue_size = 2 * MAX_ASKED  # of one step; with the default of 5, connections wait for seconds


class Drafter:
    """A server whose answers are scripted; keeps what it was asked."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds, for pauses
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any]], Answer] = lambda question: (200, {}, known(question))
        self.models: bytes = b"none"  # what the list of models is answered with
        self.may_answer = threading.Event()
        self.may_answer.set()
        drafter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(drafter.models)

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

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafter]:
    own = Drafter()
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: own.now))
    yield own
    own.close()


@pytest.fixture
def make(drafter: Drafter) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def of(**config: Any) -> Remote:
        parsed = parse_config({"method": "remote", "url": drafter.url, "model": "m", **config})
        context = ProposerContext(VOCAB_SIZE, 1 << 20, 8, K, tokenize=lambda text: [1], codec=codec)
        made.append(Remote(parsed.method_config, context))
        return made[-1]

    yield of
    for own in made:
        own.close()


@functools.cache
def codec() -> TextCodec:
    """Of the demo model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "demo" / "model")
    return TextCodec(tokenizer, len(tokenizer))


def drafted(own: Remote, text: np.ndarray, name: str = "a") -> list[int]:
    [draft] = step(own, {name: text})
    return list(draft)


def until(own: Remote, text: np.ndarray, num_tokens: int = 1) -> list[int]:
    """Steps without a new token until there is a draft of so many tokens: an answer arrives in pieces."""
    drafts: list[list[int]] = []
    wait_for(lambda: drafts.append(drafted(own, text)) or len(drafts[-1]) >= num_tokens)
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
    assert own.counts["dropped"] == 0


def test_late_answer(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A step does not wait; of an answer that comes three tokens late what still fits is drafted.

    Kills: a step that waits; a late answer that is dropped, or drafted from its beginning.
    """
    own = make()
    drafter.may_answer.clear()
    for length in range(20, 24):
        assert drafted(own, TEXT[:length]) == []
    drafter.may_answer.set()
    assert until(own, TEXT[:23], K) == TEXT[23:28].tolist()
    stats = {"asked": 2, "answered": 1, "dropped": 0, "failed": 0}
    wait_for(lambda: drafted(own, TEXT[:23]) and own.counts == stats)


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
    assert drafted(own, other) == [] and own.counts["dropped"] == 1
    drafter.may_answer.set()
    wait_for(lambda: drafter.questions[-1]["prompt"] == other.tolist())
    assert until(own, other, K) == TEXT[23:28].tolist()
    assert drafted(own, TEXT[:40], "b") == []
    own.forget(["a", "b", "nobody"])
    assert own._requests == {}


def of_text(text: bytes) -> np.ndarray:
    return np.array([0, *codec().tokenize_bytes(text)], np.int32)


def knows_text(text: bytes, num_letters: int) -> Callable[[dict[str, Any]], Answer]:
    """A drafter that knows a text, in tokens of another tokenizer with this number of letters."""

    def answer(question: dict[str, Any]) -> Answer:
        prompt = question["prompt"].encode()
        assert text.startswith(prompt)
        rest, size = text[len(prompt) :].decode(), num_letters
        rest = rest[: size * question["max_tokens"]]
        pieces = [rest[place : place + size] for place in range(0, len(rest), size)]
        return 200, {}, [*(event(text=piece) for piece in pieces), b"data: [DONE]\n\n"]

    return answer


@pytest.mark.parametrize("num_letters", [1, 3, 7])
def test_other_tokenizer(drafter: Drafter, make: Callable[..., Remote], num_letters: int) -> None:
    """A drafter that knows the text is right in the target's tokens, but for some at the end of what it has said so
    far; characters of several tokens, asked about in their middle, too; a history in other tokens is still the guess.

    Kills: a draft from another place of the text; a question with a part of a character; a guess that is dropped where
    the target spells it otherwise.
    """
    history, own = of_text(CODE), make(tokenizer="other")
    drafter.answer = knows_text(CODE, num_letters)
    num_right = num_drafted = 0
    place = 20
    while place < len(history) - 8:
        found = until(own, history[:place])
        right = [draft == token for draft, token in zip(found, history[place:].tolist(), strict=False)]
        num_right += (accepted := [*right, False].index(False))
        num_drafted += len(found)
        place += accepted + 1
    assert num_right >= 0.97 * num_drafted, (num_right, num_drafted)
    print("lost", 1 - num_right / num_drafted, own.counts)
    letters = [codec().tokenize_bytes(CODE[i : i + 1])[0] for i in range(60)]
    spelt = np.array(letters, np.int32)
    until(own_spelt := make(tokenizer="other"), spelt[:20])
    assert CODE[23:].startswith(codec().decode_bytes(until(own_spelt, spelt[:23])))
    assert own_spelt.counts["dropped"] == 0


def endless() -> Iterator[bytes]:
    while True:
        yield b" " * 10_000
        time.sleep(0.001)


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, [b"{}"]),
        (404, {}, [b"x" * 100_000]),
        (200, {}, [b"no JSON"]),
        (200, {}, [b"[" * 100_000]),
        (200, {}, [b"{}"]),
        (200, {}, [b"data: " + b"[" * 100_000 + b"\n"]),
        (200, {}, [event(token_ids=None)]),
        (200, {}, [event(text=None)]),
        (200, {}, [event(text="\ud800")]),
        (200, {}, [b'data: {"choices": [{"text": "\xff"}]}\n']),
        (200, {"Content-Length": "100"}, [b"x"]),
        (200, {"Content-Encoding": "gzip"}, [b"x" * 1000]),
        (200, {}, (b" " * 1_000_000 for _ in range(100))),
        (200, {}, [event(token_ids=[])] * 2000),
        (200, {}, endless()),
        (307, {"Location": "/elsewhere"}, []),
        *((status, {}, []) for status in (408, 409, 425)),
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
    by_text = isinstance(answer[2], list) and any(b"text" in part for part in answer[2])
    own, history = make(tokenizer="other" if by_text else "same"), of_text(CODE) if by_text else TEXT
    good, drafter.answer = knows_text(CODE, 3) if by_text else drafter.answer, lambda question: answer
    lengths = iter(range(20, 300))
    wait_for(lambda: drafted(own, history[: next(lengths)]) == [] and own.counts["failed"] > 0)
    assert caplog.text.count("remote drafts nothing, because") == 1 and {
        question["path"] for question in drafter.questions
    } == {"/v1/completions"}
    num_asked = len(drafter.questions)
    for _ in range(50):
        assert drafted(own, history[: next(lengths)]) == []
    assert len(drafter.questions) == num_asked
    drafter.answer, drafter.now = good, FIRST_PAUSE_S
    wait_for(lambda: drafted(own, history[: next(lengths)]) or time.sleep(0.05))
    assert caplog.text.count("answers again") == 1


REFUSALS = [
    (400, {}, [b"{}"]),
    (413, {}, []),
    (422, {}, [b"x" * 100_000]),
    (200, {}, [event(token_ids=[VOCAB_SIZE])]),
    (200, {}, [event(token_ids=[-1])]),
    (200, {}, [event(token_ids=[True, 1.0, "1"])]),
    (200, {}, [event(token_ids=[1] * 1000)]),
]


@pytest.mark.parametrize("answer", REFUSALS, ids=lambda answer: f"{answer[0]}")
def test_a_question_that_is_refused(
    drafter: Drafter, make: Callable[..., Remote], answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """One request's question that the server does not take, or answers with other tokens than the target has, sets that
    request aside, whatever its history becomes; others are drafted for at once; one line says so.

    Fails if a refusal pauses the server, if the request asks again, or if each one writes a line.
    """
    own, known_answer = make(), drafter.answer
    drafter.answer = lambda question: answer if question["prompt"][0] == 7 else known_answer(question)
    for number in range(3):
        odd = np.append(np.int32([7] * 20), TEXT[20:40])
        wait_for(lambda: drafted(own, odd, f"odd {number}") == [] and own.counts["failed"] > number)  # noqa: B023
        for length in (41, 42, 30, 31):
            assert drafted(own, np.resize(odd, length), f"odd {number}") == []
        assert until(own, TEXT[: 20 + number], K) == TEXT[20 + number : 25 + number].tolist()
    assert [question["prompt"][0] for question in drafter.questions].count(7) == 3
    assert caplog.text.count("refused a request") == 1 and "remote drafts nothing" not in caplog.text


def test_more_text_than_asked_for(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """Text without end sets its request aside, too. Fails if it pauses the server: a client chooses a text that the
    drafter goes on with in its longest tokens."""
    own = make(tokenizer="other")
    drafter.answer = lambda question: (200, {}, [event(text="x" * 100_000)])
    wait_for(lambda: drafted(own, of_text(CODE)[:40], "odd") == [] and own.counts["failed"] == 1)
    drafter.answer = knows_text(CODE, 3)
    assert until(own, of_text(CODE)[:30])


@pytest.mark.parametrize(
    "models",
    [
        {"data": [{"id": "else", "max_model_len": 9}, {"id": "m", "max_model_len": 64}]},
        {"data": [{"id": "m", "max_model_len": 64.9}]},
    ],
)
def test_questions_fit_the_drafter(drafter: Drafter, make: Callable[..., Remote], models: dict[str, Any]) -> None:
    """A question and its answer have room in the drafter's context, and longer histories get drafts. Fails if a
    question is cut by the target's context, or at its end."""
    drafter.models, own = json.dumps(models).encode(), make()
    known_answer = drafter.answer

    def answer(question: dict[str, Any]) -> Answer:
        prompt = question["prompt"]
        if len(prompt) + question["max_tokens"] > 64:
            return 400, {}, []
        [start] = [place for place in range(len(TEXT)) if TEXT[place : place + len(prompt)].tolist() == prompt][:1]
        return known_answer({**question, "prompt": TEXT[: start + len(prompt)].tolist()})

    drafter.answer = answer
    assert until(own, TEXT[:200], K) == TEXT[200:205].tolist() and own.counts["failed"] == 0


def test_many_requests_at_once(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A step asks a bounded number of questions, and later steps the others. Fails if a step asks for all of its
    requests, which takes half a second for 2000, or if the same requests ask each time."""
    own, texts = make(), {str(number): TEXT[: 20 + number] for number in range(2 * MAX_ASKED + 10)}
    drafter.answer = lambda question: (400, {}, [])
    for most in (MAX_ASKED, 2 * MAX_ASKED, len(texts)):
        step(own, texts)
        assert own.counts["asked"] == most


def test_each_request_has_its_turn(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """With a drafter that answers between two steps every request asks once before one asks twice. Kills: the first
    rows of the batch that take all questions of each step."""
    own, prompts = make(), {str(number): TEXT[: 20 + number] for number in range(3 * MAX_ASKED)}
    drafter.answer = lambda question: (200, {}, [event(token_ids=[])])
    for round in range(3):
        step(own, {name: np.append(text, TEXT[:round]) for name, text in prompts.items()})
        wait_for(lambda: len(drafter.questions) == (round + 1) * MAX_ASKED)  # noqa: B023
        time.sleep(0.1)
    assert len({len(question["prompt"]) for question in drafter.questions}) > 2.9 * MAX_ASKED


def test_much_text(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """Kills: lines of 120 kB that are counted as lines alone, up to 476 MiB."""
    own, num_sent = make(), [0]

    def lines() -> Iterator[bytes]:
        for _ in range(1000):
            num_sent[0] += 120_000
            yield b"x" * 120_000 + b"\n"

    drafter.answer = lambda question: (200, {}, lines())
    drafted(own, TEXT[:20])
    wait_for(lambda: drafted(own, TEXT[:21]) == [] and own.counts["failed"] == 1)
    assert num_sent[0] < 20 << 20, "the rest fills the buffers of the connection"


def test_tenants(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """Tenants do not share the drafter's prefix cache, and no question has a client's salt. Kills: questions without
    the tenant."""
    own = make()
    assert has_tenants(parse_config({"method": "remote", "url": drafter.url, "model": "m"}))
    for tenant in (b"", b"\x01" * 16, b"\x02" * 16):
        step(own, {tenant.hex(): TEXT[:20]}, {"tenant": tenant} if tenant else {})
    wait_for(lambda: len(drafter.questions) == 3)
    salts = {question.get("cache_salt") for question in drafter.questions}
    assert salts == {None, "01" * 16, "02" * 16}


@pytest.mark.parametrize("status", [400, 503])
def test_nothing_to_compare_with(drafter: Drafter, make: Callable[..., Remote], status: int) -> None:
    """Kills: a text that grows with each step while its request is refused, or the server is away, and nobody reads
    it."""
    own = make()
    drafter.answer = lambda question: (status, {}, [])
    drafted(own, TEXT[:20])
    wait_for(lambda: drafted(own, TEXT[:21]) == [] and own.counts["failed"] == 1)
    for length in range(22, 300):
        drafted(own, TEXT[:length])
    assert len(own._requests["a"].behind) < 10


def test_open_connections(drafter: Drafter, make: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    """All are answered, over a bounded number of connections. Fails if each question opens one, which ends an engine
    that may open no more files."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    own, texts = make(), {str(number): TEXT[: 20 + number] for number in range(12)}
    step(own, texts)
    wait_for(lambda: step(own, texts) and own.counts["answered"] == 12)
    drafter.may_answer.clear()
    drafter.questions.clear()
    own.forget(list(texts))
    step(own, texts)
    wait_for(lambda: len(drafter.questions) >= 4)
    time.sleep(0.05)
    num_open = len(drafter.questions)
    drafter.may_answer.set()
    assert num_open == 4
    wait_for(lambda: step(own, texts) and own.counts["answered"] == 24)


def test_a_text_fits_the_drafter(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """So does a text, if each of its bytes were a token. Fails if it is cut by the target's tokens."""
    drafter.models, own = json.dumps({"data": [{"id": "m", "max_model_len": 100}]}).encode(), make(tokenizer="other")
    drafter.answer = lambda question: (200, {}, [event(text=" =")])
    wait_for(lambda: drafted(own, of_text(CODE)))
    sizes = [len(question["prompt"].encode()) + question["max_tokens"] for question in drafter.questions]
    assert max(sizes) < 100
    assert drafter.questions[0]["prompt"] in CODE.decode()


@pytest.mark.parametrize(
    "models", [b"[" * 100_000, b"{}", b'{"data": [{"id": "m", "max_model_len": Infinity}]}', b"x" * 10]
)
def test_hostile_limits(drafter: Drafter, make: Callable[..., Remote], models: bytes) -> None:
    """What is no list of models is no limit. Fails if it ends the questions."""
    drafter.models, own = models, make()
    assert until(own, TEXT[:20]) and own.counts["failed"] == 0


def test_empty_lines_cost_little(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A megabyte of them. Fails if each costs a turn of the event loop: 1.8 s of the engine's processor time."""
    own = make()
    drafter.answer = lambda question: (200, {}, [b"\n" * 1_000_000])
    drafted(own, TEXT[:20])
    thread = own._server._thread.native_id
    wait_for(lambda: drafted(own, TEXT[:21]) == [] and own.counts["failed"] == 1)
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")")[1].split()
    assert int(fields[11]) + int(fields[12]) < 40, "hundredths of a second"


def test_a_count_after_the_text(drafter: Drafter, make: Callable[..., Remote]) -> None:
    """A server that ends each answer with what was used, without a choice, drafts. Fails if that counts as nonsense."""
    own, known_answer = make(), drafter.answer
    usage = b'data: {"choices": [], "usage": {"total_tokens": 5}}\n\n'
    drafter.answer = lambda question: (200, {}, [*known_answer(question)[2], usage])
    assert until(own, TEXT[:20]) == TEXT[20:25].tolist()
    wait_for(lambda: drafted(own, TEXT[:21]) and own.counts["answered"])
    assert own.counts["failed"] == 0


def test_server_away(drafter: Drafter, make: Callable[..., Remote], caplog: pytest.LogCaptureFixture) -> None:
    """A server that ends costs its drafts and one line. Kills: a connection error in a step."""
    own = make()
    until(own, TEXT[:20])
    drafter._server.shutdown()
    drafter._server.server_close()
    for length in range(21, 40):
        drafted(own, TEXT[:length])
        time.sleep(0.02)
    wait_for(lambda: drafted(own, TEXT[:41]) == [] and own.counts["failed"] > 0)
    assert caplog.text.count("remote drafts nothing, because") == 1


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
        ("api_key_env", "\ud800"),
    ],
)
def test_refused(field: str, value: Any) -> None:
    """What cannot be asked is refused by name. Kills: a check that passes any text."""
    with pytest.raises(ConfigError, match=f"remote: {field} must be"):
        parse_config({"method": "remote", "url": "http://host/v1", "model": "m", field: value})
