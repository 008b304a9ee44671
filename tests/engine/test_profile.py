"""The engine's profile of steps: on fakes, and in an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RUNNER

from vllm_specplugins.engine import profile

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="as on V1; test_late_drafts.py has engines with a gate on V2")


def test_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of three steps counts after one that compiles, and all ranks end by rank 0's clock. Kills: a first
    step that counts; a rank that goes by its clock, and runs steps that no other rank runs; a start of minutes."""
    now, told, steps = SimpleNamespace(s=0.0), list[Any](), list[int]()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now.s))

    def step(number: int) -> None:
        steps.append(number)
        is_first = steps.count(number) == 1
        now.s += 5.0 if is_first and number == 1 else 0.1 * number * (1 + len(steps) % 2)

    ms = profile.measure(step, 100, lambda value: told.append(value) or value)
    assert ms == pytest.approx({1: 100.0, 2: 200.0}) and set(steps) == {1, 2}, "at least two numbers"
    other = profile.measure(lambda number: None, 100, lambda value: told.pop(0))
    assert other == ms and not told


def test_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a start that ends, since there is no memory for the logits of the largest step."""
    warnings = list[str]()
    monkeypatch.setattr(profile.logger, "warning", lambda words, *values: warnings.append(words % values))

    def dummy_run(number: int, randomize_inputs: bool) -> Any:
        raise MemoryError("planted")

    one = SimpleNamespace(is_last_rank=True, world_size=1, broadcast_object=lambda value, src: value)
    for name in ("get_pp_group", "get_world_group"):
        monkeypatch.setattr(profile, name, lambda: one)
    runner = SimpleNamespace(_dummy_run=dummy_run, max_num_tokens=64, device=SimpleNamespace(type="cpu"))
    assert profile.profile_of(runner, 32) == {}
    assert warnings == ["The start cannot measure steps (MemoryError: planted), so the gate learns their times later."]


def test_in_an_engine(engine: Any) -> None:
    """Kills: a gate without a profile, which drafts nothing until it has seen steps."""
    llm = engine({"method": "prompt_lookup", "gate": "auto", "num_speculative_tokens": 3})
    proposer = llm.llm_engine.model_executor.driver_worker.worker._session.barrier.proposer
    first, last = (proposer._gate._costs.profile.ms(number) for number in (1, 32))
    assert proposer.has_gate and 0 < first <= last
