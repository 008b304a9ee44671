"""What our worker adds to vLLM's, around a base that does nothing. No engine runs here."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RUNNER

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine import worker
from vllm_specplugins.engine.v1 import runner
from vllm_specplugins.isolation import guard

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")


class Base:
    """Notes what happens, and may raise."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.raises: BaseException | None = None

    def execute_model(self, scheduler_output: Any) -> None:
        self._happens("steps")

    def sample_tokens(self, grammar_output: Any) -> None:
        self._happens("samples")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._happens("loads")

    def compile_or_warm_up_model(self) -> None:
        self._happens("warms up")

    def _happens(self, event: str) -> None:
        self.events.append(event)
        if self.raises is not None:
            raise self.raises


class Worker(worker._WithProposer, Base):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._session = SimpleNamespace(  # type: ignore[assignment]
            read=lambda news: None, log=lambda: None, is_warming_up=False
        )
        forget = lambda request_ids: self.events.append("forgets")  # noqa: E731
        self._reporter = SimpleNamespace(forget=forget, steps=SimpleNamespace(add=lambda steps: None))  # type: ignore[assignment]
        self._reports = False


STEP = SimpleNamespace(total_num_scheduled_tokens=3, finished_req_ids={"a"})


def test_rates_before_slots_are_reused() -> None:
    """Kills: the acceptance rates of finished requests read after vLLM gave their slots to waiting ones, which lost up
    to 10 of 11 rates of a full server."""
    made = Worker()
    made.execute_model(STEP)
    assert made.events == ["forgets", "steps"]


def test_a_learner_after_loading() -> None:
    """Kills: copies that learning makes in the memory of vLLM's weights, which a sleep of level 2 empties."""
    made = Worker()
    made._session.when_loaded = lambda: made.events.append("learns")
    made.load_model(load_dummy_weights=True)
    assert made.events == ["loads", "learns"]


@pytest.mark.parametrize("step", ["execute_model", "sample_tokens"])
@pytest.mark.parametrize("error", [RuntimeError("planted"), AssertionError()])
def test_a_rank_that_raises(monkeypatch: pytest.MonkeyPatch, step: str, error: Exception) -> None:
    """Its process ends, unless it returns the output: then vLLM ends the engine. Kills: an exception of a step, ours or
    vLLM's, that vLLM logs and goes on from with wrong tokens."""
    ended: list[int] = []
    monkeypatch.setattr(guard.os, "_exit", ended.append)
    made = Worker()
    made.raises = error
    for gives_output in (True, False):
        monkeypatch.setattr(worker, "gives_output", lambda given=gives_output: given)
        with pytest.raises(type(error)):
            getattr(made, step)(STEP)
        assert ended == ([] if gives_output else [1])


def test_the_mark_of_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there while vLLM warms up, and gone after an exception. Kills: requests taken for those of a warm-up."""
    made, marks = Worker(), list[bool]()
    made.vllm_config = made.model_runner = SimpleNamespace(kv_cache_config=None)  # type: ignore[assignment]
    made.use_v2_model_runner = False
    made._session.barrier = SimpleNamespace(proposer=None)
    made._reporter.method, made._reporter.drop = "any", lambda: None
    monkeypatch.setattr(worker, "tell_states", lambda *_: None)
    monkeypatch.setattr(made, "_happens", lambda event: marks.append(made._session.is_warming_up))
    made.compile_or_warm_up_model()
    assert marks == [True] and not made._session.is_warming_up
    monkeypatch.setattr(made, "_happens", lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.compile_or_warm_up_model()
    assert not made._session.is_warming_up


@pytest.mark.parametrize("is_built", [True, False])
def test_another_runner_is_refused(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_SPECPLUGINS_ON_ERROR=refuse, a runner of another class ends the start, also one that an untested vLLM
    cannot build with our method. Fails if such a server starts without drafts."""
    monkeypatch.setenv("VLLM_SPECPLUGINS_ON_ERROR", "refuse")
    monkeypatch.setattr(worker, "untested_version", lambda: "0.34.0")
    monkeypatch.setattr(runner, "while_built", lambda config: nullcontext())
    made = Worker()
    made.use_v2_model_runner, made.vllm_config, made.model_runner = False, None, object()  # type: ignore[assignment]
    if is_built:
        monkeypatch.setattr(Base, "init_device", lambda self: None, raising=False)
    problem = "does not support vLLM's model runner object" if is_built else "cannot build vLLM's model runner ("
    with pytest.raises(ConfigError, match=re.escape(f"vllm-specplugins {problem}")):
        made.init_device()
