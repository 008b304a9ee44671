"""The engine's profile of steps: on fakes, and in an engine."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RUNNER

from vllm_specplugins.engine import profile
from vllm_specplugins.engine.hooks import replaced

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="as on V1; test_late_drafts.py has engines with a gate on V2")


def test_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of three steps counts after one that compiles. Kills: a first step that counts; a start of
    minutes."""
    now, steps = SimpleNamespace(s=0.0), list[int]()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now.s))

    def step(number: int) -> None:
        steps.append(number)
        is_first = steps.count(number) == 1
        now.s += 5.0 if is_first and number == 1 else 0.1 * number * (1 + len(steps) % 2)

    assert profile.measure(step, 100) == pytest.approx({1: 100.0, 2: 200.0}), "at least two numbers"
    assert set(steps) == {1, 2}


def test_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a start that ends, since there is no memory for the logits of the largest step; vLLM's connector that
    stays disabled; ranks that wait for one that failed; steps with adapters that vLLM makes for each of them."""
    warnings = list[str]()
    monkeypatch.setattr(profile.logger, "warning", lambda words, *values: warnings.append(words % values))

    def dummy_run(number: int, **named: bool) -> Any:
        states.append(runner.kv_connector.is_disabled)
        raise MemoryError("planted")

    states, connector = list[bool](), SimpleNamespace(is_disabled=True)
    connector.set_disabled = partial(setattr, connector, "is_disabled")
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    runner: Any = SimpleNamespace(
        _dummy_run=dummy_run, max_num_tokens=64, max_num_reqs=4, device=SimpleNamespace(type="cpu"), lora_config=None,
        kv_connector=connector, vllm_config=SimpleNamespace(parallel_config=parallel), speculator="ours",
    )  # fmt: skip
    assert profile.profile_of(runner, 32) == {} and not connector.is_disabled and runner.speculator == "ours"
    assert warnings == ["The start cannot measure steps (MemoryError: planted), so the gate learns their times later."]
    for place, name in ((runner, "lora_config"), (parallel, "world_size"), (parallel, "data_parallel_size")):
        with replaced(place, {name: 2}):
            assert profile.profile_of(runner, 32) == {}
    assert len(states) == len(warnings) == 1


def test_in_an_engine(engine: Any) -> None:
    """Kills: a gate without a profile, which drafts nothing until it has seen steps."""
    llm = engine({"method": "prompt_lookup", "gate": "auto", "num_speculative_tokens": 3})
    proposer = llm.llm_engine.model_executor.driver_worker.worker._session.barrier.proposer
    first, last = (proposer._gate._costs.profile.ms(number) for number in (1, 32))
    assert proposer.has_gate and 0 < first <= last
