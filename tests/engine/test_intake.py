"""Options of requests on their way into vLLM, without an engine: where they are resolved, and by whom."""

import asyncio
import importlib
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import DEMO_MODEL, RUNNER
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_specplugins.engine.line import Line
from vllm_specplugins.engine.options import Intake, request_options
from vllm_specplugins.engine.own_checks import MOST_LEFT_BEHIND
from vllm_specplugins.methods import parse_config

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
MAX_MODEL_LEN = 4096
GO_ON = threading.Event()  # of checks that hang


class Choosy:
    """A custom proposer with an option of its own, as far as the front end sees it."""

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        if "hang" in options:
            assert GO_ON.wait(30)
        if "crash" in options:
            raise SystemExit(options["crash"])
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
def intake(tokenizer: Any) -> Intake:
    return Intake(Configured(method="prompt_lookup"), Sizes(), tokenizer)


def params(options: Any) -> SamplingParams:
    return SamplingParams(extra_args={"specplugins": options, "other": 1})


TEXT = "def f(x):\n    return x + 1\n"


def test_tokenised_once(intake: Intake, tokenizer: Any) -> None:
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


def test_beside_the_event_loop(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_line() -> None:
    """The shortest first, whoever came first; who went away is not worked for. Kills: first come, first served."""
    line, done, may_go_on = Line(), list[int](), threading.Event()
    futures = [line.submit(1, lambda: may_go_on.wait(30))]
    futures += [line.submit(size, lambda size=size: done.append(size)) for size in (900, 30, 500, 30)]
    cancelled = line.submit(10, lambda: done.append(10))
    assert cancelled.cancel()
    failing = line.submit(1000, lambda: 1 // 0)
    may_go_on.set()
    for future in futures:
        future.result(30)
    assert done == [30, 30, 500, 900]
    with pytest.raises(ZeroDivisionError):
        failing.result(30)


def test_custom_check_options(tokenizer: Any) -> None:
    """Whatever it raises is a 400 with a sentence. Kills: an exception that would be a 500, or end the server."""
    config = Configured(method="custom", proposer="test_intake:Choosy")
    intake = Intake(config, Sizes(), tokenizer)
    assert request_options(intake.resolved(params({"depth": 3, "reference": TEXT})))["depth"] == 3
    refusals = {
        '{"depth": "a"}': "depth must be an integer, not 'a'.",
        '{"crash": 3}': "3",
        '{"reference": [1, 2, 3]}': "'three'",
    }
    for raw, sentence in refusals.items():
        with pytest.raises(VLLMValidationError) as error:
            intake.resolved(params(raw))
        assert str(error.value).startswith(f"specplugins: the proposer refuses the options: {sentence}")
    stages = [{"method": "prompt_lookup"}, {"method": "custom", "proposer": "test_intake:Choosy"}]
    cascade = Intake(Configured(method="cascade", policy="first", stages=stages), Sizes(), tokenizer)
    with pytest.raises(VLLMValidationError, match="depth must be an integer"):
        cascade.resolved(params({"depth": None}))


def test_check_options_that_hangs() -> None:
    """It costs its own request the budget, and a 400, and the event loop nothing; of such checks only so many are left
    behind, until they return. Kills: a check in the event loop's thread, one that is waited for, threads without end.
    """
    intake = Intake(Configured(method="custom", proposer="test_intake:Choosy", time_budget_ms=200), Sizes(), None)
    good, hanging = params({"depth": 3}), params({"hang": 1})
    go_on = importlib.import_module("test_intake").GO_ON  # the proposer's: pytest has this file by another name
    go_on.clear()

    async def clients() -> list[Any]:
        waiting = [asyncio.create_task(intake.resolved_beside(hanging)) for _ in range(MOST_LEFT_BEHIND + 1)]
        await asyncio.sleep(0.01)
        assert request_options(await intake.resolved_beside(good))["depth"] == 3
        assert not any(task.done() for task in waiting)
        return await asyncio.gather(*waiting, return_exceptions=True)

    refused = "specplugins: the proposer refuses the options: "
    errors = asyncio.run(clients())
    assert {str(error) for error in errors} == {f"{refused}its check_options did not return within 200 ms."}
    assert all(isinstance(error, VLLMValidationError) for error in errors)
    with pytest.raises(VLLMValidationError, match="8 earlier checks of its check_options have not returned yet"):
        intake.resolved(good)
    go_on.set()
    for check in intake._checks._left_behind:
        assert check.result(30) is None
    assert request_options(intake.resolved(good))["depth"] == 3
    go_on.clear()
    with pytest.raises(VLLMValidationError, match="did not return within 200 ms"):
        intake.resolved(hanging)
    go_on.set()


def test_texts_without_a_tokenizer() -> None:
    intake = Intake(Configured(method="prompt_lookup"), Sizes(), None)
    assert len(request_options(intake.resolved(params({"reference": [1, 2]})))["reference"]) == 2
    with pytest.raises(VLLMValidationError, match="must be token ids where the engine has no tokenizer"):
        intake.resolved(params({"reference": TEXT}))


def test_a_method_that_reads_no_reference(tokenizer: Any) -> None:
    """It is checked and then left out. Kills: a reference that is tokenised, and sent, for nobody."""
    intake = Intake(Configured(method="early_exit"), Sizes(), tokenizer)
    assert request_options(intake.resolved(params({"reference": TEXT, "max_draft": 1}))) == {"max_draft": 1}
    with pytest.raises(VLLMValidationError, match="valid UTF-8"):
        intake.resolved(params({"reference": "\ud800"}))
