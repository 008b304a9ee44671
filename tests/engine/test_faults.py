"""Hostile proposers in a running engine: they cost drafts, never a request, nor a token of its output.

tests/isolation/test_barrier.py has each of them alone, and what is kept of them.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import ask_turns, generate, num_dropped, progress
from conftest import INTERPRETED, RUNNER, long, long_on_v2
from hostile import HANGS, HOSTILE, HostileProposer, K
from scripted import Scripted

from vllm_specplugins.cascade.cascade import Cascade
from vllm_specplugins.counters import Counters
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import MAX_FAULTS
from vllm_specplugins.methods import behind_gate
from vllm_specplugins.parsing import parse_config

PROMPTS = [[5, 6, 7, 8] * 5, list(range(30, 70)), [9] * 20]
BUDGET_MS = 600
NUM_TOKENS = 12
ALWAYS = 1 << 30  # questions
FEW = ["sleeps", "raises sys.exit", "returns logits", "returns ids behind the vocabulary", "writes to a history"]
NAMES = [name if name in FEW else long_on_v2(name) for name in HOSTILE]  # each half a minute in the interpreter
COMMON = {"num_speculative_tokens": K, "time_budget_ms": BUDGET_MS}
CUSTOM = {"method": "custom", "proposer": "hostile:custom", "options": {"act": "sleeps"}}


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[list[int]]:
    return generate(engine(), PROMPTS, [3], max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def engine_of_one(engine: Any, expected: Any) -> Any:
    return engine({**CUSTOM, **COMMON})


def budget_of(kind: str | None) -> float:
    return BUDGET_MS if kind == HANGS else 60_000  # a busy machine is no fault


def plant(worker: Any, name: str) -> None:
    """Runs in the worker: another proposer behind a barrier as good as new."""
    vocab_size = worker.model_config.get_vocab_size()
    act, kind = HOSTILE[name]
    FaultBarrier.__init__(worker._session.barrier, HostileProposer(act, 2), vocab_size, K, budget_of(kind))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_no_speculation(engine_of_one: Any, expected: Any, name: str) -> None:
    """Kills: a hostile proposer that reaches vLLM, or is counted under another name."""
    engine_of_one.collective_rpc(plant, args=(name,))
    kind = HOSTILE[name][1]
    assert generate(engine_of_one, PROMPTS, [3], max_tokens=NUM_TOKENS) == expected
    [stats] = engine_of_one.collective_rpc("specplugins_stats")
    assert stats["drafts"] > 0, "it worked before it failed"
    assert set(stats["faults"]) == (set() if kind is None else {kind})
    if kind not in (None, HANGS):  # one that sleeps is at work, and not asked, for the rest of the requests
        assert stats["faults"][kind] == MAX_FAULTS and stats["switched_off"]


def plant_scripted(worker: Any) -> None:
    """Runs in the worker: a proposer that drafts what a request's options say."""
    vocab_size = worker.model_config.get_vocab_size()
    scripted = Scripted({}, SimpleNamespace(vocab_size=vocab_size, max_num_draft=K))  # type: ignore[arg-type]
    FaultBarrier.__init__(worker._session.barrier, scripted, vocab_size, K, budget_of(None))


def test_session(engine_of_one: Any, expected: Any) -> None:
    """Each turn ends within a draft, and its options have its script. Fails if a turn has the options of the previous
    one, continues after dropped tokens, or is counted with them."""
    llm = engine_of_one
    llm.collective_rpc(plant_scripted)
    turns, each, answers, so_far = [PROMPTS[1], PROMPTS[0], PROMPTS[1][:1]], [], list[list[int]](), list[int]()
    for turn in turns:
        so_far += turn
        [script] = generate(llm, [so_far], [1], max_tokens=NUM_TOKENS)
        options = {"script": script, "depth": K, "num_prompt_tokens": len(so_far)}
        each.append({"stop_token_ids": [script[3]], "extra_args": {"specplugins": options}})  # of it a fourth is right
        answers.append(script[: script.index(script[3]) + 1])
        so_far += answers[-1][:-1]
    before, dropped = progress(llm), num_dropped(llm)
    assert ask_turns(llm, turns, each, max_tokens=NUM_TOKENS) == answers
    assert num_dropped(llm) > dropped
    assert (progress(llm) - before).sum() == sum(map(len, answers)) - 1


class Oracle:
    """Knows what the target says next, and takes a millisecond to say it; after `num_right` questions it is wrong."""

    def __init__(self, texts: list[list[int]], num_right: int, clock: Any):
        self._texts, self._num_right, self._clock = texts, num_right, clock
        self.asked_at: list[int] = []  # steps

    def propose(self, batch: DraftBatch) -> Draft:
        self.asked_at.append(self._clock.num_steps)
        self._clock.ms += 1.0
        token_ids, num_draft = np.zeros((batch.num_reqs, K), np.int32), np.zeros(batch.num_reqs, np.int32)
        for row, tokens in enumerate(map(np.ndarray.tolist, batch.token_ids)):
            [text] = [text for text in self._texts if text[: len(tokens)] == tokens]
            rest = text[len(tokens) :][: batch.max_num_draft[row]]
            token_ids[row, : len(rest)], num_draft[row] = rest, len(rest)
        return Draft(token_ids if len(self.asked_at) <= self._num_right else token_ids ^ 1, num_draft)

    def observe(self, feedback: Any) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


@pytest.fixture
def clock(engine_of_one: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the gate: a step takes 10 ms, and 0.1 ms for each token of a draft, however busy the machine is."""
    host = "engine.v2.speculators.host" if RUNNER == "v2" else "engine.v1.runner"
    clock, scheduler = SimpleNamespace(ms=0.0, num_steps=0), engine_of_one.llm_engine.engine_core.engine_core.scheduler
    for module in ("cascade.cascade", "cascade.stage", host):
        times = SimpleNamespace(perf_counter=lambda: clock.ms / 1000)
        monkeypatch.setattr(f"vllm_specplugins.{module}.time", times)
    schedule = scheduler.schedule

    def timed(*arguments: Any, **named: Any) -> Any:
        scheduled = schedule(*arguments, **named)
        clock.num_steps += bool(scheduled.total_num_scheduled_tokens)
        clock.ms += 10 + 0.1 * sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", timed)
    return clock


@pytest.mark.parametrize(
    ("num_right", "num_tokens"),
    [long_on_v2(ALWAYS, 150), long(ALWAYS, 900), long_on_v2(0, 300), long(50, 500 if INTERPRETED else 900)],
)
def test_share_of_questions(engine_of_one: Any, clock: Any, num_right: int, num_tokens: int) -> None:
    """A class that is right is asked in at least 95 % of an engine's steps. One that is never right is asked in at most
    2 % of the steps after the first 50, and one that is wrong after 50 questions of those after the first 100. Kills:
    reports of metrics, one a step, that move what the gate counts; a class that is asked for ever; a new request, for
    which the gate asks as if nothing were known."""
    answers = generate(engine_of_one, PROMPTS, [1], max_tokens=num_tokens)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    worker = engine_of_one.llm_engine.model_executor.driver_worker.worker
    vocab_size = worker.model_config.get_vocab_size()
    context = ProposerContext(vocab_size, 1024, 8, K, lambda text: [])
    oracle = Oracle(texts, num_right, clock)
    cascade = Cascade(behind_gate(parse_config({**CUSTOM, **COMMON})), context, [oracle])
    cascade._guards[0]._budget_ms = budget_of(None)
    FaultBarrier.__init__(worker._session.barrier, cascade, vocab_size, K, None)
    clock.num_steps = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert generate(engine_of_one, [prompt], [1], max_tokens=num_tokens) == [answer]
    num_asked, num_steps = len(oracle.asked_at), clock.num_steps
    print(f"asked in {num_asked} of {num_steps} steps")
    if num_right == ALWAYS:
        assert num_asked >= 60 and num_asked >= 0.95 * num_steps
    else:
        first = 50 + num_right  # and the step before
        assert sum(at > first for at in oracle.asked_at) <= 0.02 * (num_steps - first)


def plant_in_cascade(worker: Any, name: str) -> None:
    """Runs in the worker: the cascade's custom stage becomes hostile, and is forgiven what it did before."""
    cascade = worker._session.barrier.proposer
    stage, guard = cascade.stages[0].proposer, cascade._guards[0]
    stage.act, stage.step = HOSTILE[name][0], 0
    while guard._thread.is_busy:
        time.sleep(0.1)
    guard._breaker._fault_steps.clear()
    guard._budget_ms = budget_of(HOSTILE[name][1])
    counters = cascade.stages[0].counters
    counters.faults, counters.switched_off, counters.times_switched_off = {}, False, 0
    FaultBarrier.__init__(worker._session.barrier, cascade, worker.model_config.get_vocab_size(), K, None)
    assert worker._session.barrier.counters == Counters()


@pytest.mark.skipif(INTERPRETED, reason="as on V1, and slow through the interpreter")
def test_a_stage_costs_its_own_drafts_alone(engine: Any, expected: Any) -> None:
    """A custom stage before an exit, which goes on drafting. Kills: a stage without a budget; a stage's fault that is
    the cascade's; a cascade that is switched off with it."""
    stages = [CUSTOM, {"method": "early_exit", "exit_layer": 4}]
    llm = engine({"method": "cascade", "gate": "off", "stages": stages, **COMMON})
    for name in ("sleeps", "raises sys.exit", "writes to a history", "returns ids behind the vocabulary"):
        llm.collective_rpc(plant_in_cascade, args=(name,))
        [before] = llm.collective_rpc("specplugins_stats")
        assert generate(llm, PROMPTS, [3], max_tokens=4 * NUM_TOKENS)[0][:NUM_TOKENS] == expected[0]
        [stats] = llm.collective_rpc("specplugins_stats")
        custom, exit_stage = stats["stages"].values()
        assert set(custom["faults"]) == {HOSTILE[name][1]} and stats["faults"] == {}
        assert custom["switched_off"] or name == "sleeps"
        assert not stats["switched_off"]
        assert exit_stage["accepted"] > list(before["stages"].values())[1]["accepted"]
