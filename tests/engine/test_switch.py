"""The switch of a running engine, in its scheduler: steps that draft and plan nothing, while requests run."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, generate
from conftest import RUNNER
from played_scheduler import Played
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput

from vllm_specplugins.engine import switch
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.messages import news_of
from vllm_specplugins.engine.metrics.names import REPORT, key

SCHEDULES = [False, True] if RUNNER == "v2" else [False]


@pytest.mark.parametrize("gate", ["auto", "off"])
@pytest.mark.parametrize("is_async", SCHEDULES)
def test_thrown_under_load(is_async: bool, gate: str) -> None:
    """Ten times, while requests come and go. Fails if a step that is scheduled while drafting is off verifies, asks for
    or plans a draft, if drafting does not come back, if a request is lost or gets other numbers of tokens, or if a step
    runs other code than vLLM's once those that drafted are over."""
    played = Played({**PROMPT_LOOKUP, "gate": gate}, max_model_len=200, async_scheduling=is_async)
    assert played.is_ahead == is_async
    rng = np.random.default_rng(0)
    planned = {False: 0, True: 0}

    def counted() -> Any:
        found = type(played.scheduler).schedule(played.scheduler)
        num = sum(map(len, found.scheduled_spec_decode_tokens.values())) + found.num_spec_tokens_to_schedule
        planned[played.scheduler.is_off] += num
        assert news_of(found).is_off == played.scheduler.is_off
        return found

    played.scheduler.schedule = counted
    for throw in range(10):
        for index in range(3):
            length = int(rng.integers(1, 100))
            played.add(f"{throw} {index}", (np.arange(length) % 3).tolist(), int(rng.integers(1, 60)))
        played.scheduler.switch(throw % 2 == 0)
        for _ in range(8):
            played.step()
        assert played.scheduler.is_off == type(played.scheduler).schedule.__module__.startswith("vllm.")
    played.scheduler.switch(False)
    played.run()
    played.check()
    assert planned[True] == 0 < planned[False]


@pytest.mark.parametrize("is_async", SCHEDULES)
def test_thrown_at_any_step(is_async: bool) -> None:
    """Also twice while the same steps are under way. Fails if steps run vLLM's code before all that drafted are over,
    since dropped tokens would stay uncounted, or if they never do."""
    played = Played({**PROMPT_LOOKUP, "gate": "off"}, max_model_len=200, async_scheduling=is_async)
    rng, num_aside = np.random.default_rng(1), 0
    for index in range(300):
        if index % 8 == 0:
            played.add(str(index), [0, 1, 2] * 5, int(rng.integers(1, 20)), stops=[3])
        played.scheduler.switch(bool(rng.random() < 0.6))
        played.step()
        is_aside = type(played.scheduler).schedule.__module__.startswith("vllm.")
        num_aside += is_aside
        assert not is_aside or all(news_of(step).is_off for step, _ in played._under_way)
    played.scheduler.switch(False)
    played.run()
    played.check()
    assert num_aside


def test_counts_while_off() -> None:
    """Fails if the counts of the last steps that drafted wait until drafting is on again, or if a report that comes
    meanwhile lacks the steps."""
    played = Played({**PROMPT_LOOKUP, "gate": "off"}, max_model_len=200, async_scheduling=False)
    steps, reports = list[Any](), list[dict[str, Any]]()
    run = played._run

    def scheduled() -> Any:
        steps.append(type(played.scheduler).schedule(played.scheduler))
        return steps[-1]

    def reported(step: Any) -> Any:
        output = run(step)
        reports.append({})
        output.ec_connector_output = ECConnectorOutput(ec_connector_stats=ECConnectorStats({REPORT: reports[-1]}))
        return output

    played.scheduler.schedule, played._run = scheduled, reported  # type: ignore[method-assign]
    played.add("a", [0, 1, 2] * 5, 100)
    for is_off in (False, True):
        played.scheduler.switch(is_off)
        for _ in range(5):
            played.step()
    told = [news_of(step) for step in steps]
    assert [news.is_off for news in told] == 5 * [False] + 5 * [True]
    assert [news.sums is not None for news in told] == 6 * [False] + [True] + 3 * [False]
    assert [report[key("steps")] for report in reports] == [0] + 9 * [1]


def test_a_bound_method() -> None:
    """`bench`, and a profiler, wrap a scheduler's method. Fails if steps run vLLM's code after drafting is on again."""
    played = Played({**PROMPT_LOOKUP, "gate": "off"}, max_model_len=200, async_scheduling=False)
    wrap(played.scheduler, "update_from_output", lambda update, *step: update(*step))
    played.add("a", [0, 1, 2] * 5, 100)
    for is_off in (False, True, False):
        played.scheduler.switch(is_off)
        for _ in range(3):
            played.step()
        assert is_off == type(played.scheduler).schedule.__module__.startswith("vllm.")


@pytest.mark.skipif(RUNNER == "v2", reason="V1's; V2 drafts in its samplers")
def test_v1_prepares_no_drafts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step counts, prepares or asks for drafts while drafting is off, if tokens differ, if drafting does not
    come back, or if the gate takes the time in which drafting was off for a step's."""
    llm = engine({**PROMPT_LOOKUP, "gate": "off"})
    worker = llm.llm_engine.model_executor.driver_worker.worker
    prompts = [[5, 6, 7, 5, 6], [9, 10, 9, 10, 9]]
    called, times = list[str](), list[float | None]()
    for name in ("_calc_spec_decode_metadata", "propose_draft_token_ids", "take_draft_token_ids"):
        wrap(worker.model_runner, name, lambda theirs, *step, name=name: (called.append(name), theirs(*step))[1])
    barrier = worker._session.barrier
    monkeypatch.setattr(barrier, "draft", lambda batch, told: (times.append(told.step_ms), draft(batch, told))[1])
    draft = type(barrier).draft.__get__(barrier)
    answers = []
    for mode in ("none", "none", "auto"):
        llm.collective_rpc("specplugins_gate", args=(mode,))
        called.clear()
        answers.append(generate(llm, prompts, [2], max_tokens=16))
        counts = [called.count(name) for name in ("_calc_spec_decode_metadata", "propose_draft_token_ids")]
        assert (counts[0] == counts[1] <= 2) if mode == "none" else counts[0] > 4
        assert bool(times) == (mode == "auto")
    assert answers[0] == answers[1] == answers[2]
    assert times[0] is None and any(times)


@pytest.mark.skipif(RUNNER == "v1", reason="V2's")
def test_a_prompt_while_off() -> None:
    """A step that reads a prompt gives the drafts of no token the probability 0. Fails if the next steps run vLLM's
    code at once: the first drafts after "auto" would be trimmed."""
    from vllm_specplugins.engine.v2.runner import _is_aside

    speculator, found = SimpleNamespace(num_off=9, reads_tokens=False, watchers=[]), []
    for has_prefill in (False, True, False, False, False, False):
        speculator.num_off += 1
        found.append(_is_aside(speculator, SimpleNamespace(has_prefill=has_prefill, num_draft_tokens=0)))
    assert found == [True, False, False, False, False, True]


class Core:
    """vLLM's engine as far as the switch knows it."""

    def __init__(self, scheduler: Any, *states: str):
        self.scheduler, self._states = scheduler, states

    def collective_rpc(self, method: str, *args: Any) -> Any:
        return list(self._states)


@pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
def test_workers_have_the_last_word() -> None:
    """Fails if a worker that cannot draft is planned for, if another method switches, or if the user's scheduler drops
    the call without a sentence."""
    wrap(Core, "collective_rpc", switch._with_scheduler)
    thrown: list[bool] = []
    ours = SimpleNamespace(switch=thrown.append)
    assert Core(ours, "auto", "auto").collective_rpc(switch.GATE) == ["auto", "auto"]
    Core(ours, "auto", "none").collective_rpc(switch.GATE)
    Core(ours, "none").collective_rpc("specplugins_stats")
    assert thrown == [False, True]
    Core(SimpleNamespace(), "auto").collective_rpc(switch.GATE)
    with pytest.raises(ValueError, match="remove scheduler_cls"):
        Core(SimpleNamespace(), "none").collective_rpc(switch.GATE)


@pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
def test_modes() -> None:
    """Fails if a word is taken for a mode, or engines that wait for each other may draft unequally."""
    assert [switch.checked_mode(mode, 1) for mode in ("none", "auto")] == ["none", "auto"]
    assert switch.checked_mode("auto", 2) == "auto"
    for mode, size, words in (("off", 1, "mode must be 'none' or 'auto', not"), ("none", 2, "data_parallel_size")):
        with pytest.raises(ValueError, match=words):
            switch.checked_mode(mode, size)
