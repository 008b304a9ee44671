"""Options of requests on their way into vLLM, without an engine: where they are resolved, and by whom."""

import asyncio
import gc
import importlib
import json
import threading
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import DEMO_MODEL, RUNNER
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_specplugins.engine.frontend.options import MAX_ABANDONED, OptionsResolver, request_options
from vllm_specplugins.engine.frontend.prediction import Predicted
from vllm_specplugins.engine.frontend.priority_executor import PIECE, PriorityExecutor, Work, pieces
from vllm_specplugins.parsing import parse_config

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
MAX_MODEL_LEN = 4096
GO_ON = threading.Event()  # of checks that hang


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Choosy:
    """A custom proposer with an option of its own, as far as the front end sees it."""

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        if "hang" in options:
            assert GO_ON.wait(30)
        if "crash" in options:
            raise SystemExit(options["crash"])
        if "unspeakable" in options:
            raise Unspeakable
        if "reference" in options and options["reference"].tolist() == [1, 2, 3]:
            raise KeyError("three")
        if not isinstance(options.get("depth", 1), int):
            raise ValueError(f"depth must be an integer, not {options['depth']!r}.")


class Sizes:
    """What an intake asks a model's configuration."""

    max_model_len = MAX_MODEL_LEN

    def get_vocab_size(self) -> int:
        return 3072


class Configured:
    def __init__(self, **config: Any):
        self.plugin_config = parse_config(config)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(DEMO_MODEL))


@pytest.fixture
def intake(tokenizer: Any) -> OptionsResolver:
    return OptionsResolver(Configured(method="prompt_lookup"), Sizes(), tokenizer)


def params(options: Any) -> SamplingParams:
    return SamplingParams(extra_args={"specplugins": options, "other": 1})


TEXT = "def f(x):\n    return x + 1\n"


def test_tokenised_once(intake: OptionsResolver, tokenizer: Any) -> None:
    """What the worker reads are ids; the caller's parameters stay as they are. Kills: a text that travels on, a second
    tokenisation, parameters that are changed in place."""
    raw = params(json.dumps({"reference": TEXT, "max_draft": 2}))
    found = intake.resolved(raw)
    assert raw.extra_args["specplugins"] == json.dumps({"reference": TEXT, "max_draft": 2})
    options = request_options(found)
    assert options["reference"].tolist() == tokenizer.encode(TEXT, add_special_tokens=False)
    assert options["max_draft"] == 2 and found.extra_args["other"] == 1
    assert intake.resolved(found) is found
    assert asyncio.run(intake.resolved_beside(found)) is found
    assert request_options(raw) == {}, "nothing is read that came past the front end"


def test_flat_keys(intake: OptionsResolver) -> None:
    """Flat keys join the text, and precede it; a flag may be a number or a text. Kills: flat keys that are ignored
    alone, that travel on, or whose bad value passes.
    """

    def options(**flat: Any) -> Any:
        extra_args = {key.replace("__", "."): value for key, value in flat.items()}
        found = intake.resolved(SamplingParams(extra_args={**extra_args, "other": 1}))
        assert found.extra_args.keys() == {"specplugins", "other"} and intake.resolved(found) is found
        return request_options(found)

    assert options(specplugins__max_draft=4, specplugins__enabled=0) == {"max_draft": 4, "enabled": False}
    assert options(specplugins='{"max_draft": 2, "learn": false}', specplugins__max_draft=4) == {
        "max_draft": 4,
        "learn": False,
    }
    assert options(specplugins={"max_draft": 2}, specplugins__learn="true") == {"max_draft": 2, "learn": True}
    assert options(specplugins__reference=[1, 2])["reference"].tolist() == [1, 2]
    for bad in ({"specplugins__enabled": 2}, {"specplugins__draft": 1}, {"specplugins__max_draft": "4"}):
        with pytest.raises(VLLMValidationError, match="specplugins: "):
            options(**bad)
    plain = SamplingParams(extra_args={"specplugin.max_draft": 4})
    assert intake.resolved(plain) is plain


def test_beside_the_event_loop(intake: OptionsResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a text that is tokenised in the event loop's thread, and a loop that waits for it."""
    threads: list[int] = []
    may_go_on = threading.Event()
    encode = intake._tokenizer.encode

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        assert may_go_on.wait(30)
        return encode(*args, **kwargs)

    monkeypatch.setattr(intake._tokenizer, "encode", slow)

    async def two_clients() -> tuple[SamplingParams, SamplingParams]:
        waiting = asyncio.create_task(intake.resolved_beside(params({"reference": TEXT})))
        await asyncio.sleep(0.05)
        other = await intake.resolved_beside(params({"reference": [1, 2]}))
        assert not waiting.done()
        may_go_on.set()
        return await waiting, other

    first, second = asyncio.run(two_clients())
    assert len(request_options(first)["reference"]) > 5
    assert request_options(second)["reference"].tolist() == [1, 2]
    assert threads and threading.get_ident() not in threads


def saying(done: list[int], size: int, num_pieces: int = 1) -> Work[int]:
    """Work that records its size after each piece."""
    for _ in range(num_pieces):
        done.append(size)
        yield
    return size


def waiting_for(event: threading.Event) -> Work[bool]:
    yield
    return event.wait(30)


def failing() -> Work[int]:
    yield
    return 1 // 0


def test_line() -> None:
    """The shortest first, whoever came first; who went away is not worked for. Kills: first come, first served."""
    line, done, may_go_on = PriorityExecutor(), list[int](), threading.Event()
    futures: list[Any] = [line.submit(1, waiting_for(may_go_on))]
    futures += [line.submit(size, saying(done, size)) for size in (9000000, 300000, 5000000, 300000)]
    cancelled = line.submit(10, saying(done, 10))
    assert cancelled.cancel()
    fails = line.submit(10000000, failing())
    may_go_on.set()
    assert [future.result(30) for future in futures[1:]] == [9000000, 300000, 5000000, 300000]
    assert done == [300000, 300000, 5000000, 9000000]
    with pytest.raises(ZeroDivisionError):
        fails.result(30)


def test_line_ages() -> None:
    """A text waits for shorter ones that came before it or soon after, and for no others. Kills: starvation by a
    stream of texts that are a little shorter."""
    now, done, may_go_on = [0.0], list[int](), threading.Event()
    line = PriorityExecutor(clock=lambda: now[0])
    first = line.submit(1, waiting_for(may_go_on))
    long = line.submit(65_000, saying(done, 65_000))
    for step in range(50):
        now[0] = step * 0.1
        last = line.submit(64_000, saying(done, 64_000))
    may_go_on.set()
    assert first.result(30) and long.result(30) and last.result(30)
    assert done.index(65_000) == 1


def test_line_works_by_pieces() -> None:
    """A short text that comes meanwhile waits for one piece of a long one. Kills: texts that are tokenised whole."""
    line, done, may_go_on, begun = PriorityExecutor(), list[int](), threading.Event(), threading.Event()

    def long() -> Work[None]:
        for piece in range(3):
            begun.set()
            assert may_go_on.wait(30)
            done.append(piece)
            yield

    whole = line.submit(100_000_000, long())
    assert begun.wait(30)
    short = line.submit(100, saying(done, 100))
    may_go_on.set()
    assert short.result(30) == 100 and whole.result(30) is None
    assert done == [0, 100, 1, 2]


def test_pieces_of_a_text(tokenizer: Any, intake: OptionsResolver) -> None:
    """The same tokens as of the whole, and no more work than `max_model_len` allows. Kills: a seam within a word; a
    text that is tokenised to its end though it has too many tokens already."""
    text = TEXT * 200
    assert len(list(pieces(text))) > 1 and "".join(pieces("x" * 10_000)) == "x" * 10_000
    ids = request_options(intake.resolved(params({"reference": text})))["reference"]
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    long = "a b " * 8_000
    work = intake._tokenize(long)
    assert (
        len(PriorityExecutor().submit(1, work).result(30)) // 4
        < MAX_MODEL_LEN + PIECE
        < len(tokenizer.encode(long, add_special_tokens=False))
    )
    with pytest.raises(VLLMValidationError, match="reference must be at most 4096 tokens"):
        intake.resolved(params({"reference": long}))


@pytest.mark.parametrize("unit", ["abcdef\n", "abcdef\U0001f600", "\u4f60\u597d"])
def test_what_a_long_text_takes(unit: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a context of 128 k tokens: the decoded text and its tokens. Kills: tokens held as
    numbers of Python, data that is held when it is done."""
    monkeypatch.setattr(Sizes, "max_model_len", 1 << 17)
    intake = OptionsResolver(Configured(method="prompt_lookup"), Sizes(), tokenizer)
    per_unit = len(tokenizer.encode(unit * 10, add_special_tokens=False)) / 10
    raw = params(json.dumps({"reference": unit * int(0.95 * (1 << 17) / per_unit)}))

    async def take_in() -> tuple[int, int]:
        found = await intake.resolved_beside(raw)
        peak = tracemalloc.get_traced_memory()[1]
        return peak, len(request_options(found)["reference"])

    asyncio.run(take_in())  # what is made once
    tracemalloc.start()
    peak, num_tokens = asyncio.run(take_in())
    ends = time.monotonic() + 30  # by which the thread that did the work has let go of it
    while (left := tracemalloc.get_traced_memory()[0]) >= 100_000 and time.monotonic() < ends:
        time.sleep(0.01)
        gc.collect()
    tracemalloc.stop()
    assert num_tokens > 0.9 * (1 << 17) and peak < 3_000_000 and left < 100_000


@pytest.mark.parametrize(
    ("key", "meant"),
    [("specplugin.enabled", "specplugins.enabled"), ("spec_plugins.maxdraft", "specplugins.max_draft"), ("other", "")],
)
def test_a_wrong_prefix(key: str, meant: str, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Kills: an option that vLLM ignores in silence, since its prefix is misspelt; a warning for each request, or for a
    key of others."""
    intake = OptionsResolver(Configured(method="prompt_lookup"), Sizes(), tokenizer)
    for _ in range(2):
        asked = SamplingParams(extra_args={key: 0})
        assert intake.resolved(asked) is asked
    assert len(caplog.records) == bool(meant) and f"did you mean '{meant}'?" * bool(meant) in caplog.text


def test_custom_check_options(tokenizer: Any) -> None:
    """Whatever it raises is a 400 with a sentence. Kills: an exception that would be a 500, or end the server."""
    config = Configured(method="custom", proposer="test_intake:Choosy")
    intake = OptionsResolver(config, Sizes(), tokenizer)
    assert request_options(intake.resolved(params({"depth": 3, "reference": TEXT})))["depth"] == 3
    refusals = {
        '{"depth": "a"}': "depth must be an integer, not 'a'.",
        '{"crash": 3}': "3",
        '{"unspeakable": 1}': "an error that cannot be shown",
        '{"reference": [1, 2, 3]}': "'three'",
    }
    for raw, sentence in refusals.items():
        with pytest.raises(VLLMValidationError) as error:
            intake.resolved(params(raw))
        assert str(error.value).startswith(f"specplugins: the proposer refuses the options: {sentence}")
    stages = [{"method": "prompt_lookup"}, {"method": "custom", "proposer": "test_intake:Choosy"}]
    cascade = OptionsResolver(Configured(method="cascade", stages=stages), Sizes(), tokenizer)
    with pytest.raises(VLLMValidationError, match="depth must be an integer"):
        cascade.resolved(params({"depth": None}))


def test_check_options_that_hangs() -> None:
    """It costs its own request the budget, and a 400, and the event loop nothing; of such checks only so many are left
    behind, until they return, and others are never refused: they get no drafts. Kills: a check in the event loop's
    thread, one that is waited for, threads without end, a check of options that are none of the proposer's.
    """
    intake = OptionsResolver(
        Configured(method="custom", proposer="test_intake:Choosy", time_budget_ms=1500), Sizes(), None
    )
    good, hanging = params({"depth": 3}), params({"hang": 1})
    go_on = importlib.import_module("test_intake").GO_ON  # the proposer's: pytest has this file by another name
    go_on.clear()

    async def clients() -> list[Any]:
        waiting = [asyncio.create_task(intake.resolved_beside(hanging)) for _ in range(MAX_ABANDONED + 1)]
        await asyncio.sleep(0.01)
        assert request_options(await intake.resolved_beside(good))["depth"] == 3
        assert not any(task.done() for task in waiting)
        return await asyncio.gather(*waiting, return_exceptions=True)

    refused = "specplugins: the proposer refuses the options: "
    errors = asyncio.run(clients())
    assert {str(error) for error in errors} == {f"{refused}its check_options did not return within 1500 ms."}
    assert all(isinstance(error, VLLMValidationError) for error in errors)
    for options in ({"enabled": False}, {"learn": False}, {"max_draft": 1, "max_context": 5}, {"stages": ["custom"]}):
        assert request_options(intake.resolved(params(options))) == options, "no business of the check's"
    for found in (intake.resolved(good), asyncio.run(intake.resolved_beside(params({"depth": 3, "reference": [7]})))):
        assert request_options(found) == {"enabled": False}, "served, without drafts"
    go_on.set()
    for check in intake._checks._abandoned:
        assert check.result(30) is None
    assert request_options(intake.resolved(good))["depth"] == 3
    go_on.clear()
    with pytest.raises(VLLMValidationError, match="did not return within 1500 ms"):
        intake.resolved(hanging)
    go_on.set()


def test_prediction(intake: OptionsResolver, tokenizer: Any) -> None:
    """OpenAI's `prediction` is the option `reference`, which comes before it. Kills: parts that get lost; a prediction
    that is checked, or refused, for a method that reads none; one that is taken for a client's own option."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [{"type": "text", "text": TEXT[:8]}, {"type": "text", "text": TEXT[8:]}]
    for content in (TEXT, parts):
        for options in (None, '{"max_draft": 2}', {"max_draft": 2}):
            found = request_options(
                intake.resolved(params(Predicted({"type": "content", "content": content}, options)))
            )
            assert found["reference"].tolist() == ids and found.get("max_draft") == (options and 2)
    own = params(Predicted({"type": "content", "content": TEXT}, '{"reference": [1, 2]}'))
    assert request_options(intake.resolved(own))["reference"].tolist() == [1, 2]
    long = [{"type": "text", "text": "abcd" * 1000}] * 9
    with pytest.raises(VLLMValidationError, match=r"^prediction must be at most 32768 bytes of text"):
        intake.resolved(params(Predicted({"type": "content", "content": long}, None)))
    for prediction in (5, {}, {"content": 5}, {"content": [5]}, {"content": [{"type": "image_url"}]}, [], "text"):
        with pytest.raises(VLLMValidationError, match=r"^prediction must be .*, not .*\.$"):
            intake.resolved(params(Predicted(prediction, None)))
        other = OptionsResolver(Configured(method="early_exit"), Sizes(), tokenizer)
        assert request_options(other.resolved(params(Predicted(prediction, {"max_draft": 1})))) == {"max_draft": 1}


@pytest.mark.parametrize("raw", [0, 0.0, "", 1, True, []])
def test_no_dictionary(intake: OptionsResolver, raw: Any) -> None:
    """Kills: options that equal False or are empty, and pass; also beside a prediction."""
    for given in (raw, Predicted({"type": "content", "content": TEXT}, raw)):
        with pytest.raises(VLLMValidationError, match="specplugins must be a dictionary or its JSON text, not "):
            intake.resolved(params(given))


def test_texts_without_a_tokenizer() -> None:
    intake = OptionsResolver(Configured(method="prompt_lookup"), Sizes(), None)
    assert len(request_options(intake.resolved(params({"reference": [1, 2]})))["reference"]) == 2
    with pytest.raises(VLLMValidationError, match="must be token ids: the engine has no tokenizer"):
        intake.resolved(params({"reference": TEXT}))


def test_a_method_that_reads_no_reference(tokenizer: Any) -> None:
    """It is checked and then left out. Fails if a reference that no method reads is tokenized and sent."""
    intake = OptionsResolver(Configured(method="early_exit"), Sizes(), tokenizer)
    assert request_options(intake.resolved(params({"reference": TEXT, "max_draft": 1}))) == {"max_draft": 1}
    with pytest.raises(VLLMValidationError, match="valid UTF-8"):
        intake.resolved(params({"reference": "\ud800"}))
