"""The gate in simulation: texts whose drafts are accepted with known chances, steps with known costs."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.gate.draft_tracker import DraftTracker
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.gate.load_costs import MARGIN, StepCosts
from vllm_specplugins.gate.profile import StepProfile
from vllm_specplugins.structures.arrays import SlotTable
from vllm_specplugins.structures.drafts import DraftArrays, of_stage

K = 6
LOOKUP, EXIT = 0, 1
Factors = Callable[[int], float] | None


@dataclass
class Engine:
    """Steps of `base + slope * verified draft tokens` ms for num_reqs requests; drafting costs draft_ms a token."""

    base: float = 30.0
    slope: float = 0.5
    draft_ms: float = 0.0
    num_reqs: int = 1
    noise: float = 0.05

    def profile(self, factor: float = 1.0) -> StepProfile:
        """What the engine measured at its start, with a price of a token that is off by this factor."""
        return StepProfile({self.num_reqs: self.base, self.num_reqs + 8: self.base + 8 * factor * self.slope})


class NamedGate(Gate):
    """A gate that knows requests by name, and takes one request's fate at a time. What costs nothing to draft is there
    when it is asked."""

    def __init__(self, engine: Engine, factor: float = 1.0) -> None:
        self.rows, self.tracker = SlotTable(), DraftTracker(2, K)
        super().__init__(self.tracker, K)
        self._costs.profile = engine.profile(factor)

    def rows_of(self, ids: list[str]) -> np.ndarray:
        rows = self.rows.of(ids)
        self.tracker.make_room(self.rows.num_rows)
        return rows

    def chosen(self, ids: list[str], stage: int, confidence: float, is_free: bool = True) -> list[int]:
        rows, sure, limits = self.rows_of(ids), np.full(len(ids), confidence), np.full(len(ids), K)
        found = drafts_of(stage, is_free * limits, confidence)
        most = limits - found.num_draft
        each = sure[:, None] + np.arange(K)
        kept, own = self.split_draft(rows, found, stage, each, most, limits, True)
        return (kept + own).tolist()

    def add_fates(self, fates: dict[str, tuple[int, int]], stage: int, confidence: float) -> None:
        """(tokens drafted, tokens accepted) by request."""
        rows, counts = self.rows_of(list(fates)), np.array(list(fates.values())).T.copy()
        self.tracker.keep(rows, drafts_of(stage, counts[0], confidence))
        self.tracker.observe(rows, *counts)

    def forget(self, ids: list[str]) -> None:
        self.tracker.clear(self.rows.forget(ids))


def drafts_of(stage: int, num_draft: np.ndarray, confidence: float) -> DraftArrays:
    count = len(num_draft)
    return of_stage(stage, np.zeros((count, K), np.int32), num_draft, np.full(count, confidence))


def simulate(
    gate: NamedGate,
    engine: Engine,
    accept_probs: list[float],
    rng: random.Random,
    stage: int = LOOKUP,
    confidence: float = 4.0,
    prefix: str = "",
) -> tuple[float, list[int]]:
    """Runs a step for each chance of a next token. Returns tokens/ms, and the draft lengths of the first request."""
    total_ms, total_tokens, lengths = 0.0, 0, []
    for accept_prob in accept_probs:
        ids = [f"{prefix}{i}" for i in range(engine.num_reqs)]
        drafts = gate.chosen(ids, stage, confidence, not engine.draft_ms)
        lengths.append(drafts[0])
        drafting = engine.draft_ms * max(drafts)
        if engine.draft_ms:
            gate.add_drafting(stage, drafting, max(drafts))
        emitted, fates = 0, {}
        for i, num_draft in enumerate(drafts):
            accepted = 0
            while accepted < num_draft and rng.random() < accept_prob:
                accepted += 1
            if num_draft:
                fates[f"{prefix}{i}"] = num_draft, accepted
            emitted += 1 + accepted
        if fates:
            gate.add_fates(fates, stage, confidence)
        ms = (engine.base + engine.slope * sum(drafts)) * rng.lognormvariate(0, engine.noise)
        gate.add_step(engine.num_reqs, ms, drafting, sum(drafts), emitted)
        total_ms, total_tokens = total_ms + ms + drafting, total_tokens + emitted
    return total_tokens / total_ms, lengths


def plain(engine: Engine) -> float:
    return engine.num_reqs / engine.base


def best_fixed(engine: Engine, accept_prob: float) -> float:
    """Tokens/ms of the best fixed length, in expectation."""

    def speed(k: int) -> float:
        tokens = sum(accept_prob**i for i in range(k + 1)) * engine.num_reqs
        return tokens / (engine.base + k * (engine.slope * engine.num_reqs + engine.draft_ms))

    return max(map(speed, range(K + 1)))


ENGINES = {
    "one request": Engine(),
    "hot batch": Engine(base=100, slope=3.0, num_reqs=32),
    "one request, costly stage": Engine(draft_ms=6.0),
    "batch, costly stage": Engine(base=60, slope=1.5, num_reqs=8, draft_ms=8.0),
    "compute bound": Engine(base=10, slope=10.0),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("accept_prob", [0.0, 0.05, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1.5])
def test_close_to_the_best_fixed_length_and_never_lost(name: str, accept_prob: float, factor: float) -> None:
    """400 steps of one kind of text, also with a profile that is wrong. Kills: a price without the cost of drafting, or
    without that of verifying; a profile that is believed against steps."""
    engine = ENGINES[name]
    speeds = [
        simulate(NamedGate(engine, factor), engine, [accept_prob] * 400, random.Random(seed))[0] for seed in range(5)
    ]
    assert mean(speeds) >= 0.97 * plain(engine)
    assert mean(speeds) >= 0.90 * best_fixed(engine, accept_prob)


def test_off_within_64_tokens_and_on_within_32() -> None:
    """Text that copies, stops copying, and copies again; on an engine where a useless draft costs. Of 20 runs, two may
    take longer. Kills: a rate that useless drafts make smaller, so that more of them pay."""
    num_late = 0
    for seed in range(20):
        engine, rng = Engine(base=30, slope=6.0), random.Random(seed)
        gate = NamedGate(engine)
        _, before = simulate(gate, engine, [0.95] * 60, rng)
        assert mean(before[20:]) > 3
        _, off = simulate(gate, engine, [0.0] * 200, rng)
        assert mean(off[80:]) < 0.2 and max(off[80:]) <= 1
        _, on = simulate(gate, engine, [0.95] * 60, rng)
        first = next(i for i, length in enumerate(on) if length >= 3)
        tokens_until_then = first + sum(on[:first])
        num_late += max(off[64:]) > 1 or tokens_until_then > 32
    assert num_late <= 2


def test_short_outputs_learn_from_each_other() -> None:
    """A request of 16 tokens cannot learn by itself. Kills: a prior that forgets what all requests taught."""
    engine = Engine(base=30, slope=6.0)
    rng, gate = random.Random(1), NamedGate(engine)
    speeds, drafted = [], []
    for request in range(60):
        speed, lengths = simulate(gate, engine, [0.0] * 16, rng, prefix=f"{request}/")
        speeds.append(speed)
        drafted.append(sum(lengths))
        gate.forget([f"{request}/0"])
    assert mean(speeds[20:]) >= 0.97 * plain(engine)
    assert mean(drafted[20:]) < 1.5


class HeldUp(NamedGate):
    """A gate that is told of some drafts and steps that they took longer.

    Args:
        calls, drafted, steps: how many times as long, by how many there were of drafts, of steps with some, of all.
    """

    def __init__(self, engine: Engine, calls: Factors = None, drafted: Factors = None, steps: Factors = None):
        super().__init__(engine)
        self._factors = [factors or (lambda count: 1.0) for factors in (calls, drafted, steps)]
        self._counts = [0, 0, 0]

    def _held_up(self, kind: int) -> float:
        self._counts[kind] += 1
        return self._factors[kind](self._counts[kind])

    def add_drafting(self, stage: int, ms: float, *more: Any) -> None:
        super().add_drafting(stage, ms * self._held_up(0), *more)

    def add_step(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        ms *= self._held_up(2) * (self._held_up(1) if num_draft else 1.0)
        super().add_step(num_reqs, ms, drafting_ms, num_draft, num_emitted)


def once(place: int, factor: float) -> Factors:
    return lambda count: factor if count == place else 1.0


HOLD_UPS: dict[str, dict[str, Factors]] = {
    "none": {},
    "the first draft that is timed": {"calls": once(2, 10.0)},
    "a later draft": {"calls": once(4, 10.0)},
    "one that is known": {"calls": once(6, 100.0)},
    "the first step with drafts": {"drafted": once(1, 10.0)},
    "somewhat": {"drafted": once(1, 2.5)},
    "the second": {"drafted": once(2, 10.0)},
    "the first steps of all": {"steps": lambda count: 10.0 if count < 4 else 1.0},
    "pauses": {"steps": lambda count: 15.0 if count % 4 == 3 else 1.0},
}


@pytest.mark.parametrize("num_reqs", [1, 4])
@pytest.mark.parametrize("name", HOLD_UPS)
def test_a_stage_that_pays_is_found_whatever_holds_up(name: str, num_reqs: int) -> None:
    """A stage whose drafts make it 1.6 times as fast (1.4 with four requests): after 20 steps it drafts in nearly all,
    and where it is never right nothing is lost. Fails if one slow step with drafts sets the price of a token, if one
    slow draft is a stage's time, if what was learned of slow steps alone stays, or if every slow step is left out."""
    engine = Engine(base=90.0, slope=9.0 if num_reqs == 1 else 4.0, draft_ms=5.0, num_reqs=num_reqs)
    speeds, useless = [], []
    for seed in range(5):
        gate = HeldUp(engine, **HOLD_UPS[name])
        speed, lengths = simulate(gate, engine, [0.65] * 100, random.Random(seed), EXIT, 1.0)
        assert mean(length > 0 for length in lengths[20:]) > 0.9
        speeds.append(speed)
        gate = HeldUp(engine, **HOLD_UPS[name])
        useless.append(simulate(gate, engine, [0.0] * 200, random.Random(seed), EXIT, 1.0)[0])
    assert mean(speeds) > (1.5 if num_reqs == 1 else 1.3) * plain(engine)
    assert mean(useless) > 0.97 * plain(engine)


def test_steps_that_stay_slower_are_believed() -> None:
    """Fails if every step that takes three times what others took is left out for ever."""
    costs = StepCosts(Engine(base=20.0).profile())
    for step in range(40):
        costs.add(1, 20.0 if step < 20 else 100.0, 0.0, 0, 1)
    assert costs.mean_ms == pytest.approx(100.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_scale_is_learned(factor: float) -> None:
    """From noisy times, hiccups among them, beside a profile that is wrong by this factor, on a host that takes 5 ms
    beside it. Kills: a covariance that forgets the decay; a profile that steps do not correct."""
    engine = Engine(base=40.0, slope=1.5)
    rng, costs = random.Random(4), StepCosts(engine.profile(factor))
    for step in range(400):
        num_draft = rng.randrange(7)
        hiccup = 500.0 if step % 50 == 49 else 0.0
        costs.add(1, 45 + 1.5 * num_draft + rng.gauss(0, 0.5) + hiccup, 0.0, num_draft, 1)
    assert costs.after(1, 6)[-1] == pytest.approx(9.0, rel=0.25)
    assert costs.mean_ms == pytest.approx(49.5, abs=2)


def test_a_token_that_took_no_time_at_the_start() -> None:
    """With a long context each token takes half of a step, but the start measured tokens without one, and took the
    second one for free. Kills: a gate that drafts a useless token in each step for good, since its time can never
    differ from a profile that is flat."""
    engine, speeds = Engine(base=7.4, slope=3.6), []
    for seed in range(5):
        gate = NamedGate(engine)
        gate._costs.profile = StepProfile({1: 4.0, 2: 4.0, 4: 4.02, 9: 4.4})
        rng = random.Random(seed)
        speeds.append([simulate(gate, engine, [0.01] * 400, rng)[0] for _ in range(2)])
    first, later = map(mean, zip(*speeds, strict=True))
    assert first >= 0.78 * plain(engine) and later >= 0.97 * plain(engine)


def test_bent_costs() -> None:
    """Tokens of one request that are free up to the fourth one and dear after it. Fails if all have one price, or if a
    token may cost less than the one before it."""
    costs = StepCosts.first(StepProfile({1: 40.0, 3: 40.1, 5: 40.0, 9: 52.0}), 1)  # 3 ms a token
    rate = 0.1 / MARGIN

    def number(*survivals: float) -> int:
        return int((np.array(survivals) >= costs.price(rate, 1, np.array(survivals))).sum())

    assert number(0.9, 0.5, 0.1, 0.05) == number(0.9, 0.5, 0.1, 0.05, 0.04, 0.03) == 4
    assert number(*np.linspace(0.9, 0.31, 12)) == 12 and number(*np.linspace(0.9, 0.2, 5)) == 4


def test_price() -> None:
    """Of 4 requests, in steps that are free up to 8 tokens and dear in blocks of 8 after these. Kills: a price by the
    next token alone, which stops before a block that pays as a whole, or starts one that does not."""
    costs = StepCosts.first(StepProfile(dict(enumerate(np.repeat([40.0, 50.0, 60.0], 8).tolist(), 1))), 4)
    rate = 0.3 / MARGIN  # 3 tokens a block

    def number(*survivals: float) -> int:
        scores = np.array(survivals) - 1e-3 * np.arange(len(survivals))
        return int((scores >= costs.price(rate, 4, scores)).sum())

    assert number(0.9, 0.5, 0.1, 0.05) == 4, "they are free"
    assert number(*[0.9] * 6) == 4 and number(*[0.9] * 8) == 8, "two more do not pay for a block, and four do"
    assert number(*[0.9] * 4, *[0.5] * 8) == 12, "the eight of a block pay together"
    assert costs.price(rate, 4, np.zeros(0)) == 0 and costs.price(rate, 4, np.ones(4)) == pytest.approx(0.75)


@pytest.mark.parametrize("lengths", [(0, 7), (5, 7)])
def test_step_costs_while_the_load_changes(lengths: tuple[int, int]) -> None:
    """Requests that each take 0.25 ms of attention beside their draft tokens end one by one, twice, and then more come.
    Fails if the time of their attention counts as that of their draft tokens, or if drafts that grow while steps become
    shorter look free (a scale of 0)."""
    rng, costs = random.Random(4), StepCosts(StepProfile({1: 6.018, 1000: 24.0}))
    for num_reqs in [*range(127, 64, -1), *range(127, 64, -1), *range(64, 127)]:
        num_draft = sum(rng.randint(*lengths) for _ in range(num_reqs)) + (num_reqs if num_reqs < 90 else 0)
        ms = (6 + 0.25 * num_reqs + 0.018 * num_draft) * rng.lognormvariate(0, 0.01)
        costs.add(num_reqs, ms, 0.0, num_draft, num_reqs)
    assert costs.after(num_reqs, 100)[-1] == pytest.approx(1.8, rel=0.3)


def test_first_step_of_a_size_is_forgotten() -> None:
    """It may have compiled something for seconds. Kills: a gate that takes every step of that size for a slow one."""
    gates = [NamedGate(Engine()), NamedGate(Engine())]
    for gate, first_ms in zip(gates, (30.0, 9000.0), strict=True):
        for ms in (first_ms, 30.0, 31.0):
            gate.add_step(16, ms, 0.1, 16, 20)
    assert gates[0]._costs.of(16, 0).mean_ms == gates[1]._costs.of(16, 0).mean_ms < 32


def test_costs_by_context() -> None:
    """Steps of short and long contexts in turns. Fails if a context's costs are another's, or if one that is new begins
    without what was learned of others."""
    gate = NamedGate(Engine(20.0, 0.5, num_reqs=4))
    for step in range(200):
        gate.num_context, base = ((500, 20.0), (60_000, 45.0))[step % 2]
        num_draft = step // 2 % 5
        gate.add_step(4, base + 0.5 * num_draft, 0.0, num_draft, 4)
    found = {context: gate._costs.of(4, context) for context in (500, 60_000, 40_000, 900_000)}
    assert found[500].mean_ms == pytest.approx(21, abs=0.3) and found[60_000].mean_ms == pytest.approx(46, abs=0.3)
    assert found[40_000] is found[60_000], "of the same size"
    assert found[900_000] == found[60_000] and found[900_000] is not found[60_000]
    alone = gate._costs.of(1, 0)
    assert alone.scale == pytest.approx(found[500].scale, abs=0.1) and alone.mean_emitted == 1
    assert NamedGate(Engine(20.0, 0.5))._costs.of(1, 0).step_ms == 20.0, "the profile's"


def test_a_stage_of_no_use_is_asked_now_and_then() -> None:
    """Of steps of 30 ms, 3 ms are spent in 32, and then once in 64, and the counts are moved after each. Fails if what
    never pays is asked in each step, if what costs next to nothing is not, if accepted tokens pay for other than the
    calls that take their time, or if a reader that moves the counts changes any of it."""

    def asks(gate: NamedGate, num_steps: int) -> list[bool]:
        asked = []
        for _ in range(num_steps):
            asked.append(gate.asks(LOOKUP, 1))
            gate.tracker.move_to([StageCounters(), StageCounters()])
        return asked

    def new(answer_ms: float) -> NamedGate:
        gate = NamedGate(Engine(30.0))
        gate.rows_of(["a"])
        for _ in range(3):
            gate.add_drafting(LOOKUP, answer_ms, 0)
            gate.add_step(1, 30.0, 0.0, 0, 1)
        return gate

    assert asks(new(0.1), 200) == [True] * 200
    gate = new(3.0)
    assert asks(gate, 32) == [True] * 32
    assert sum(asks(gate, 128)) == 2
    gate.add_fates({"a": (3, 1)}, LOOKUP, 4.0)
    assert asks(gate, 12) == [True] * 10 + [False] * 2, "its token took 30 ms"
    gate.add_fates({"a": (5, 5)}, LOOKUP, 4.0)
    assert asks(gate, 34) == [True] * 32 + [False] * 2


def test_same_inputs_same_choices() -> None:
    engine = Engine()
    runs = [simulate(NamedGate(engine), engine, [0.7] * 100, random.Random(9)) for _ in range(2)]
    assert runs[0] == runs[1]
