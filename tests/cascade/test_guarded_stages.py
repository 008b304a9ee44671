"""Guards of a cascade's stages: a fault of one stage costs only its drafts."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hostile import HOSTILE, VOCAB_SIZE, HostileProposer, K

from vllm_specplugins.cascade.built_in import guard_of
from vllm_specplugins.cascade.cascade import Cascade
from vllm_specplugins.config import CascadeConfig, ConfigError, CustomConfig
from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation import guard
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import FIRST_PAUSE_S, HANGS, MAX_FAULTS, RAISED, SLOW
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config

CONTEXT = ProposerContext(VOCAB_SIZE, 64, 8, K, lambda text: [], time_budget_ms=60_000)
LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}
NOTHING = {"method": "prompt_lookup", "min_ngram": 5, "max_ngram": 5}
CUSTOM = {"method": "custom", "proposer": "hostile:custom", "options": {"act": "sleeps"}}
BUILT_IN = {"method": "draft_model", "model": "m"}
# Prompt lookup drafts for the first request alone.
HISTORIES = [[7, 8, 9, 7], [1, 2, 3, 4]]


def cascade(*stages: Any, act: str = "sleeps", context: ProposerContext = CONTEXT) -> Cascade:
    """One of a single stage is given a second one that finds nothing."""
    stages = (*stages, NOTHING) if len(stages) == 1 else stages
    config = {"method": "cascade", "gate": "off", "stages": list(stages)}
    proposer = build_proposer(parse_config(config), context)
    assert isinstance(proposer, Cascade)
    for stage in (held.proposer for held in proposer.stages):
        if isinstance(stage, HostileProposer):
            stage.act, stage.start = HOSTILE[act][0], 0
    return proposer


def barrier_of(proposer: Cascade, **more: Any) -> FaultBarrier:
    return FaultBarrier(proposer, VOCAB_SIZE, K, None, **more)


def step(barrier: FaultBarrier, options: Any = ({}, {})) -> list[int]:
    histories = [np.array(history, np.int32) for history in HISTORIES]
    batch = DraftBatch(["a", "b"], histories, np.full(2, 3, np.int32), options)
    counts = np.zeros(2, np.int32)
    lengths: list[int] = barrier.propose(batch, Feedback(["a", "b"], counts, counts)).num_draft.tolist()
    return lengths


@pytest.mark.parametrize("act", [name for name, (_, kind) in HOSTILE.items() if kind not in (None, HANGS)])
def test_a_hostile_stage(act: str) -> None:
    """Kills: a stage's fault that costs another stage's draft, is counted as the cascade's, or passes unchecked."""
    barrier = barrier_of(cascade(LOOKUP, CUSTOM, act=act))
    assert step(barrier) == [3, 0]
    stages = barrier.totals().stages
    assert stages["1 custom"].faults == {HOSTILE[act][1]: 1}
    assert barrier.counters.faults == stages["0 prompt_lookup"].faults == {}


def test_stages_forget_when_nothing_follows() -> None:
    """A stage forgets ended requests in the engine's idle step, once, in its thread. Fails if it learns of them only at
    its next call, which an engine without requests never makes."""
    proposer = cascade({"method": "suffix_lookup", "store_bytes": 1 << 20}, CUSTOM)
    barrier, own = barrier_of(proposer), proposer.stages[0].proposer
    step(barrier)
    barrier.forget(["a", "b"])
    assert own.store_stats()["texts"] == 0
    for _ in range(2):
        barrier.settle()
        assert own.store_stats()["texts"] == 2  # type: ignore[attr-defined]
    assert barrier.totals().stages["0 suffix_lookup"].faults == {}


@pytest.mark.parametrize("act", ["sleeps", "counts for ever"])
def test_a_sleeper_costs_one_budget(act: str) -> None:
    """Kills: a cascade in the engine's thread without a budget; a budget that each step waits for again."""
    proposer = cascade(CUSTOM, LOOKUP, act=act, context=replace(CONTEXT, time_budget_ms=400))
    barrier, thread = barrier_of(proposer), proposer._guards[0]._thread
    with mock.patch.object(thread, "call", wraps=thread.call) as waits:
        assert [step(barrier) for _ in range(4)] == [[3, 0]] * 4
    assert waits.call_count == 1, "not at each of four steps"
    assert barrier.totals().stages["0 custom"].faults == {HANGS: 1}


def test_a_stage_is_switched_off_and_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    config = parse_config({"method": "cascade", "gate": "off", "stages": [CUSTOM, LOOKUP]})
    assert isinstance(config.method_config, CascadeConfig)
    hostile = HostileProposer(HOSTILE["raises sys.exit"][0])
    proposer = Cascade(config, CONTEXT, [hostile, cascade(LOOKUP).stages[0].proposer])
    proposer._guards[0]._breaker.clock = lambda: now[0]
    barrier = barrier_of(proposer)
    for _ in range(MAX_FAULTS + 2):
        assert step(barrier) == [3, 0]
    counters = barrier.totals().stages["0 custom"]
    assert counters.faults == {RAISED: MAX_FAULTS} and counters.switched_off and not barrier.counters.switched_off
    assert hostile.step == MAX_FAULTS
    now[0], hostile.act = FIRST_PAUSE_S, lambda batch, good: good
    assert step(barrier) == [2, 2]
    assert not counters.switched_off and counters.times_switched_off == 1
    assert any("Stage 0 (custom): the circuit breaker closes" in record.getMessage() for record in caplog.records)


def test_a_clients_reference_is_its_own_fault() -> None:
    """Kills: a reference that lookup fails at and that costs another request its draft, or counts as the stage's."""
    barrier = barrier_of(cascade(LOOKUP))
    for _ in range(2 * MAX_FAULTS):
        assert step(barrier, ({}, {"reference": object()})) == [3, 0]
    counters = barrier.totals().stages["0 prompt_lookup"]
    assert counters.faults == {} and not counters.switched_off


def test_other_ranks_are_told() -> None:
    """Rank 1 calls no stage on the host, since a user's proposer may draft other tokens there."""
    told: list[Any] = []
    rank_0 = replace(CONTEXT, num_ranks=2, agreed=lambda rows: told.append(rows) or rows)
    rank_1 = replace(CONTEXT, num_ranks=2, rank=1, agreed=lambda rows: told.pop(0))
    ranks = [cascade(CUSTOM, act="returns the batch's own arrays", context=context) for context in (rank_0, rank_1)]
    drafts = [step(barrier_of(rank)) for rank in ranks]
    assert drafts[0] == drafts[1] == [3, 3] and not told
    assert [rank.stages[0].proposer.step for rank in ranks] == [1, 0]  # type: ignore[attr-defined]
    assert [rank.stage_counters()["0 custom"].drafted for rank in ranks] == [6, 6]


def test_a_built_in_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exceptions stop, its slowness counts, and it is switched off and not run. Kills: each of these."""
    proposer = cascade(BUILT_IN, LOOKUP)
    barrier, times = barrier_of(proposer), [0.0, 1.0, 2.0, 3.0, 4.0, 65.0, 66.0, 127.0]
    call = guard_of(proposer).call_in_engine
    monkeypatch.setattr(guard, "time", SimpleNamespace(perf_counter=lambda: times.pop(0) if times else 127.0))

    def fails() -> Any:
        raise RuntimeError("out of memory")

    assert call(lambda: 5, is_timed=True) == 5
    assert call(fails, is_timed=True) is None
    counters = barrier.totals().stages["0 draft_model"]
    assert counters.faults == {RAISED: 1}
    assert call(lambda: 5, is_timed=False) == 5, "taking in prompts may last"
    assert call(lambda: 5, is_timed=True) == 5, "late, but a draft"
    assert counters.faults == {RAISED: 1, SLOW: 1}
    for _ in range(MAX_FAULTS - 2):
        assert call(fails, is_timed=True) is None
    assert counters.switched_off
    assert call(lambda: 5, is_timed=True) is None
    assert step(barrier) == [3, 0], "the others draft"


def test_a_built_in_stage_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one. Kills: a fault that is swallowed; a switching-off that one rank decides."""
    proposer = cascade(BUILT_IN, LOOKUP, context=replace(CONTEXT, num_ranks=2, time_budget_ms=1))
    barrier = barrier_of(proposer)
    call = guard_of(proposer).call_in_engine
    for _ in range(MAX_FAULTS):
        assert call(lambda: time.sleep(0.01) or 5, is_timed=True) == 5
    assert barrier.totals().stages["0 draft_model"].faults == {}
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        call(lambda: 1 / 0, is_timed=True)


class Unbuildable:
    def __init__(self, options: Any, context: Any):
        raise options["error"]


def no_proposer(options: Any, context: Any) -> Any:
    return threading.Lock()


class SetsHandlers:
    """Takes the signals that end an engine."""

    def __init__(self, options: Any, context: Any):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def propose(self, batch: Any) -> Any: ...
    def observe(self, feedback: Any) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


def test_what_ends_an_engine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal handlers stay those from before a proposer was built. Fails if an engine continues after a signal."""
    monkeypatch.setattr(sys.modules["hostile"], "SetsHandlers", SetsHandlers, raising=False)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    build_proposer(parse_config({"method": "custom", "proposer": "hostile:SetsHandlers"}), CONTEXT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_construction_fails_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["hostile"]
    monkeypatch.setattr(module, "Unbuildable", Unbuildable, raising=False)
    monkeypatch.setattr(module, "no_proposer", no_proposer, raising=False)
    config = parse_config({"method": "custom", "proposer": "hostile:Unbuildable"})
    for error in (SystemExit(3), RuntimeError("no file"), BaseException()):
        own = CustomConfig(proposer="hostile:Unbuildable", options={"error": error})
        with pytest.raises(ConfigError, match="custom: proposer 'hostile:Unbuildable' cannot be built") as caught:
            build_proposer(replace(config, method_config=own), CONTEXT)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    config = parse_config({"method": "custom", "proposer": "hostile:no_proposer"})
    with pytest.raises(ConfigError, match=r"has no method propose, observe, forget\."):
        build_proposer(config, CONTEXT)
