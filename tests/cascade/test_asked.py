"""Tests when a gate calls a custom class, in simulations on one rank and on two, with a clock of the test."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.cascade import cascade, stage
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.methods import behind_gate, build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.structures.drafts import DraftArrays, of_stage

K, VOCAB_SIZE = 5, 1000
CONTEXT = ProposerContext(VOCAB_SIZE, 4096, 8, K, lambda text: [])
CUSTOM = {"method": "custom", "proposer": "played:Played"}
STEP_MS, TOKEN_MS = 10.0, 0.1


class Played:
    """Drafts K tokens in a time of the test, or nothing."""

    clock: Any
    ms, length, num_asked = 1.0, K, 0

    def __init__(self, options: Any, context: Any):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        self.num_asked += 1
        Played.clock.ms += self.ms
        num_reqs = len(batch.request_ids)
        return Draft(np.full((num_reqs, K), 7, np.int32), np.minimum(batch.max_num_draft, self.length).astype(np.int32))

    def observe(self, feedback: Feedback) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each look takes 10 us."""
    module: Any = ModuleType("played")
    module.Played = Played
    monkeypatch.setitem(sys.modules, "played", module)
    clock = SimpleNamespace(ms=0.0)

    def now() -> float:
        clock.ms += 0.01
        return float(clock.ms) / 1000

    monkeypatch.setattr(Played, "clock", clock, raising=False)
    for part in (cascade, stage):
        monkeypatch.setattr(part, "time", SimpleNamespace(perf_counter=now))
    yield clock


def steps(
    num_steps: int, right: Any, num_reqs: int = 1, ms: Any = lambda step: 1.0, length: Any = lambda step: K,
    is_mixed: Any = lambda step: False,
) -> list[tuple[bool, int]]:  # fmt: skip
    """Whether the class was asked in each step, and the tokens that go to the target, where a step of each request
    takes 10 ms, its share of a longer one with prompts too, and its metrics are read."""
    config = behind_gate(parse_config({**CUSTOM, "num_speculative_tokens": K}))
    proposer: Any = build_proposer(config, CONTEXT)
    barrier, played = FaultBarrier(proposer, VOCAB_SIZE, K, None), proposer.stages[0].proposer
    names = [str(row) for row in range(num_reqs)]
    drafted = accepted = np.zeros(num_reqs, np.int32)
    steps = list[tuple[bool, int]]()
    for step in range(num_steps):
        before, played.ms, played.length = played.num_asked, ms(step), length(step)
        step_ms = STEP_MS + TOKEN_MS * float(drafted.sum())
        batch = DraftBatch(names, [np.arange(20 + step, dtype=np.int32)] * num_reqs, np.full(num_reqs, K, np.int32), ())
        times: dict[str, Any] = {"mixed_ms" if is_mixed(step) else "step_ms": step_ms}
        draft = barrier.propose(replace(batch, options=[{}] * num_reqs), Feedback(names, drafted, accepted, **times))
        drafted = draft.num_draft
        accepted = drafted if right(step) else np.zeros(num_reqs, np.int32)
        steps.append((played.num_asked > before, int(drafted.sum())))
        barrier.totals()  # as the metrics' reader does
    return steps


def asked(*arguments: Any, **named: Any) -> list[bool]:
    return [was_asked for was_asked, _ in steps(*arguments, **named)]


@pytest.mark.parametrize("num_reqs", [1, 4])
def test_a_class_that_is_right_is_asked(num_reqs: int) -> None:
    """In at least 95 % of the steps. Kills: a reader of metrics that moves the counts by which the gate asks."""
    assert np.mean(asked(400, right=lambda step: True, num_reqs=num_reqs)) >= 0.95


@pytest.mark.parametrize("num_reqs", [1, 4])
@pytest.mark.parametrize("length", [K, 0])
@pytest.mark.parametrize("num_right", [0, 50])
def test_a_class_that_is_never_right_is_rarely_asked(num_right: int, length: int, num_reqs: int) -> None:
    """In at most 2 % of the steps after its first 50, whether its drafts are wrong or empty; after 50 right ones, of
    those from step 100 on. Kills: a wrong token that pays for a question, since the gate sent it to the target; a trial
    that does; questions by their share of the time alone: 1 ms of each 10 steps of 10 ms."""
    lengths = {"length": lambda step: K if step < num_right else length, "num_reqs": num_reqs}
    right = asked(2000, right=lambda step: step < num_right, **lengths)
    assert sum(right[:num_right]) >= 0.9 * num_right and np.mean(right[50 + num_right :]) <= 0.02
    assert sum(right[500:]) >= 20, "it is asked again for ever"


def test_a_class_is_asked_again() -> None:
    """Its text changes back to one that it knows. Kills: questions that a tried token, which was right, does not bring
    back."""
    back = asked(1600, right=lambda step: step < 50 or step >= 800)
    assert np.mean(back[600:800]) <= 0.02 and np.mean(back[1200:]) >= 0.95


def test_one_slow_answer() -> None:
    """1,000 ms, the default budget, once. Kills: the next question after the 10,000 steps of which that is 1 %."""
    empty = asked(1500, right=lambda step: False, ms=lambda step: 1000.0 if step == 3 else 1.0, length=lambda step: 0)
    assert sum(empty[200:]) >= 5


@pytest.mark.parametrize("num_reqs", [1, 4])
def test_constant_prompts(num_reqs: int) -> None:
    """Each step of a new engine reads prompts, too: it drafts after a while, and as before once a step only decodes.
    Kills: a gate that stays cold while there is no step of its own; times of such steps that count beside others."""
    drafted = [num for _, num in steps(300, lambda step: True, num_reqs, is_mixed=lambda step: step < 200)]
    assert sum(drafted[:50]) == 0 and min(drafted[120:200]) > 0 and min(drafted[240:]) == num_reqs * K
    warm = [num for _, num in steps(300, lambda step: True, num_reqs, is_mixed=lambda step: step >= 100)]
    assert min(warm[60:]) == num_reqs * K


def test_steps_that_sample_nothing() -> None:
    """A long prompt takes more than COLD_STEPS steps, in which no request samples. Kills: a time of a step without
    requests, by whose number the gate then divides."""
    proposer: Any = build_proposer(behind_gate(parse_config({**CUSTOM, "num_speculative_tokens": K})), CONTEXT)
    none = np.zeros(0, np.int32)
    for _ in range(60):
        proposer.observe(Feedback([], none, none, mixed_ms=0.0))
    assert proposer._gate._costs.of(1, 0) is None


class Model:
    """Runs the target: on two ranks each of its passes is a collective."""

    continues_drafts = True

    def __init__(self) -> None:
        self.passes: list[int] = []

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_tokens: Any) -> DraftArrays:
        self.passes.append(int(max_tokens.max()))
        starts = 0 if prefix is None else prefix.num_draft
        drafts = of_stage(0, np.full((len(max_tokens), K), 3, np.int32), max_tokens, np.full(len(max_tokens), 0.8))
        return drafts if prefix is None else drafts.shifted(starts)


STAGES: dict[str, Any] = {
    "lookup": {"method": "prompt_lookup", "min_ngram": 1},
    "custom": CUSTOM,
    "model": {"method": "early_exit", "exit_layer": 1},
}


@pytest.mark.parametrize("order", list(itertools.permutations(STAGES)), ids="-".join)
def test_two_ranks(monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]) -> None:
    """Two ranks of 500 steps, whose clocks differ, draft the same, run the model for the same number of tokens, and
    agree as often. Kills: a fact that one rank counts, such as a question that the gate did not ask, by which every
    rank chooses: then one rank waits in a collective for ever."""
    told: list[Any] = []
    rank_0 = replace(CONTEXT, num_ranks=2, agreed=lambda value: told.append(value) or value)
    rank_1 = replace(CONTEXT, num_ranks=2, rank=1, agreed=lambda value: told.pop(0))
    parts = {"method": "cascade", "num_speculative_tokens": K, "stages": [STAGES[name] for name in order]}
    config = parse_config(parts)
    ranks, models = list[Any](), list[Model]()
    for context in (rank_0, rank_1):
        models.append(Model())
        proposers = [
            models[-1] if part.method == "early_exit" else build_proposer(part, context) for part in config.stages
        ]
        ranks.append(cascade.Cascade(config, context, proposers))
    custom, model = order.index("custom"), order.index("model")
    played = ranks[0].stages[custom].proposer
    random, num_reqs = np.random.default_rng(1), 2
    names = [str(row) for row in range(num_reqs)]
    histories = [random.integers(0, 6, 60).tolist() for _ in names]
    drafted = accepted = np.zeros(num_reqs, np.int32)
    for step in range(500):
        played.length = K * (step % 97 < 11)  # now and then it has drafts
        for history, num in zip(histories, accepted.tolist(), strict=True):
            history += random.integers(0, 6, 1 + num).tolist()
        texts = [np.array(history[-80:], np.int32) for history in histories]
        batch = DraftBatch(names, texts, np.full(num_reqs, K, np.int32), [{}] * num_reqs)
        feedback = Feedback(names, drafted, accepted, 20.0 + 0.5 * float(drafted.sum()))
        drafts = list[Draft]()
        for rank in ranks:
            rank.observe(feedback)
            drafts.append(rank.propose(batch))
            Played.clock.ms += 1.0  # the second one begins later
        assert not told, step
        assert models[0].passes == models[1].passes, step
        for name in ("token_ids", "num_draft"):
            np.testing.assert_array_equal(getattr(drafts[0], name), getattr(drafts[1], name), str(step))
        if step % 3 == 0:  # readers of metrics differ, too
            ranks[0].stage_counters()
        drafted = drafts[0].num_draft
        stages = ranks[0]._tracker.state.sent_stage[ranks[0]._rows.of(names)]
        chances = 0.1 if step < 250 else np.where(stages[:, :K] == model, 0.3, 0.15)  # nothing pays, then the model
        accepted = np.minimum((random.random((num_reqs, K)) < chances).cumprod(axis=1).sum(axis=1), drafted)
        accepted = accepted.astype(np.int32)
    assert ranks[0].stages[custom].num_spared > 100 or order[0] == "custom"
    assert models[0].passes
