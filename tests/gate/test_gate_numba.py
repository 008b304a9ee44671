"""Compares the compiled loops of the host with the operations on arrays that they replace, and with plain counting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm_specplugins.kernels.acceptance import (
    HOST_PRIOR_WEIGHT,
    PRIOR_WEIGHT,
    Drafts,
    host,
    observe,
    predict,
    reference,
)
from vllm_specplugins.kernels.acceptance.reference import new_state

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.gate.draft_tracker import DraftTracker, rated
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.gate.load_costs import StepCosts
from vllm_specplugins.gate.trials import GOOD_ACCEPTANCE
from vllm_specplugins.structures.drafts import DraftArrays, join, of_stage

K, NUM_STAGES, NUM_ROWS = 5, 3, 9


def random_drafts(rng: np.random.Generator, num_reqs: int) -> DraftArrays:
    """Returns random drafts of two stages, the second after the first."""
    parts = [
        of_stage(
            int(rng.integers(NUM_STAGES)),
            rng.integers(0, 99, (num_reqs, K)).astype(np.int32),
            rng.integers(0, K // 2 + 1, num_reqs),
            rng.integers(1, 9, num_reqs) * rng.choice([1.0, 0.1]),
        )
        for _ in range(2)
    ]
    return join(*parts)


def probs(tracker: DraftTracker, rows: Any, stage: int, confidence: Any) -> Any:
    """[R, K] acceptance probabilities of a stage's tokens."""
    by_row = zip(rows, confidence, strict=True)
    return np.array([[host.accept_prob(tracker.state, row, stage, each) for each in tokens] for row, tokens in by_row])


def plain_counts(drafts: DraftArrays, most: Sequence[int], stage: int) -> tuple[int, int]:
    """Tokens and drafts of a stage among the first tokens of each draft."""
    counts = [row[:length].tolist().count(stage) for row, length in zip(drafts.stage, most, strict=True)]
    return sum(counts), sum(map(bool, counts))


@pytest.mark.parametrize("prior_weight", [HOST_PRIOR_WEIGHT, PRIOR_WEIGHT])
def test_tracker(monkeypatch: pytest.MonkeyPatch, prior_weight: float) -> None:
    """Beside plain loops, and the reference of what is learned, with the host's prior and the device's. Fails if a row
    is mixed up, if a fate counts twice, if a token that was not verified counts, or a draft once for each token; if a
    grade, a prior or a decay is another, or if one step adds more to the record of all requests than it may."""
    monkeypatch.setattr(reference, "PRIOR_WEIGHT", prior_weight)
    rng, tracker = np.random.default_rng(1), DraftTracker(NUM_STAGES, K, prior_weight)
    state = new_state(NUM_STAGES, NUM_ROWS, K, "cpu", prior_weight)
    tracker.make_room(NUM_ROWS)
    counters, plain = ([StageCounters() for _ in range(NUM_STAGES)] for _ in range(2))
    for _ in range(60):
        num_reqs = int(rng.integers(1, NUM_ROWS))
        rows, drafts = rng.permutation(NUM_ROWS)[:num_reqs], random_drafts(rng, num_reqs)
        lengths = drafts.num_draft.tolist()
        own = Drafts(*map(torch.from_numpy, (drafts.num_draft, drafts.stage, drafts.confidence)))
        expected = torch.empty(num_reqs, K, dtype=torch.float64)
        predict(state, torch.from_numpy(rows), own, expected)
        np.testing.assert_allclose(tracker.accept_probs(rows, rated(drafts)), expected, rtol=0, atol=1e-9)
        draft = tracker.keep(rows, drafts)
        assert draft.num_draft.tolist() == lengths and draft.token_ids.shape[1] == max(lengths)
        verified = rng.integers(0, K + 1, num_reqs).astype(np.int32)
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        for _ in range(2):  # a step may be told twice
            tracker.observe(rows, verified, accepted)
        known = np.minimum(verified, drafts.num_draft)
        fates = (torch.from_numpy(counts) for counts in (accepted + 1, verified - accepted))
        observe(state, torch.from_numpy(rows), *fates)
        for stage, own in enumerate(plain):
            kept, num_drafts = plain_counts(drafts, lengths, stage)
            own.kept, own.drafts = own.kept + kept, own.drafts + num_drafts
            own.verified += plain_counts(drafts, known.tolist(), stage)[0]
            own.accepted += plain_counts(drafts, np.minimum(known, accepted).tolist(), stage)[0]
        if rng.random() < 0.5:
            tracker.move_to(counters)
    tracker.move_to(counters)
    for counted, own_plain in zip(counters, plain, strict=True):
        assert sum(counted.accepted_at) == counted.accepted
        for name in ("kept", "drafts", "verified", "accepted"):
            assert getattr(counted, name) == getattr(own_plain, name) > 0


def test_refused_tokens() -> None:
    """A token that a grammar refused before the target saw it counts as tried and rejected, but not as verified, and
    only where the target accepted all tokens before it. Kills: a record that learns nothing from such drafts."""
    tracker, counters = DraftTracker(1, K), [StageCounters()]
    tracker.make_room(3)
    drafts = of_stage(0, np.zeros((3, K), np.int32), np.full(3, K), np.ones(3))
    before = tracker.state.shared_tried.sum(), tracker.state.shared_accepted.sum()
    tracker.keep(np.arange(3), drafts)
    tracker.observe(np.arange(3), np.array([0, 2, 2], np.int32), np.array([0, 2, 1], np.int32), np.ones(3, np.int32))
    tried, accepted = (tracker.state.tried.sum(axis=(1, 2)), tracker.state.accepted.sum(axis=(1, 2)))
    assert tried.tolist() == [1, 3, 2] and accepted.tolist() == [0, 2, 1]
    assert tracker.state.shared_tried.sum() > before[0] and not tracker.whole[:3].any()
    tracker.move_to(counters)
    assert counters[0].verified == 4 and counters[0].accepted == 3


def learned(rng: np.random.Generator) -> DraftTracker:
    """Of random drafts of two stages."""
    tracker = DraftTracker(2, K)
    tracker.make_room(NUM_ROWS)
    for _ in range(30):
        stage, lengths = np.tile(rng.integers(0, 2, (NUM_ROWS, 1)), K), rng.integers(0, K + 1, NUM_ROWS)
        right = np.minimum(rng.integers(0, 2 * K, NUM_ROWS), lengths)
        drafts = of_stage(0, np.zeros((NUM_ROWS, K), np.int32), lengths, rng.integers(1, 9, NUM_ROWS) * 1.0)
        tracker.keep(np.arange(NUM_ROWS), drafts._replace(stage=stage))
        tracker.observe(np.arange(NUM_ROWS), lengths, right)
    return tracker


def worth_of(accept_probs: list[float], prices: Any) -> float:
    """Of tokens after each other."""
    return sum(survival - price for survival, price in zip(np.cumprod(accept_probs).tolist(), prices, strict=False))


def expected_shares(
    gate: Gate, costs: StepCosts, rows: Any, found: DraftArrays, sure: Any, most: Any, max_draft: Any, continues: bool
) -> tuple[list[int], list[int]]:
    """By trying every depth, and for each request every draft that it allows."""
    others = of_stage(1, found.token_ids, most, sure)
    rate, price = gate._price(costs, rows, rated(found), rated(others))
    prices, draft_price = [price] * K, rate * gate._stages[1].token.ms
    own = [probs(gate._tracker, rows[i : i + 1], 1, sure[i] + np.arange(K)[None])[0].tolist() for i in range(len(rows))]
    plans = []
    for depth in range(K + 1):
        total, plan = -depth * draft_price, []
        for index in range(len(rows)):
            had = [
                host.accept_prob(gate._tracker.state, rows[index], int(stage), at)
                for stage, at in zip(found.stage[index], found.confidence[index], strict=True)
            ][: found.num_draft[index]]
            pays = next((at for at, survival in enumerate(np.cumprod(had)) if survival < prices[at]), len(had))
            room = int(min(most[index], depth))
            drafts = [(0, count) for count in range(room + 1)]
            drafts += [(pays, count) for count in range(min(room, max_draft[index] - pays) + 1 if continues else 1)]
            values = [worth_of(had[:kept] + own[index][:count], prices) for kept, count in drafts]
            best = max(values)
            total += best
            # Of those as good the shortest of the exit's, and rather behind the lookup's than alone.
            kept, count = max(
                (draft for draft, value in zip(drafts, values, strict=True) if value > best - 1e-12),
                key=lambda draft: (draft[0] > 0, -draft[1]),
            )
            plan.append((kept, count))
        plans.append((total, plan))
    best_total = max(total for total, _ in plans)
    _, plan = next((total, plan) for total, plan in plans if total > best_total - 1e-12)
    whole, followed = gate._tracker.whole[rows].astype(int), [kept for kept, _ in plan]
    nobody = [kept + count == 0 for kept, count in plan]
    if price < GOOD_ACCEPTANCE:
        again = [2 * whole[index, found.stage[index, 0]] for index in range(len(rows))]
        followed = [min(more, num) if none else kept for none, kept, more, num
                    in zip(nobody, followed, again, found.num_draft, strict=True)]  # fmt: skip
    follow = [none and not kept and whole[index, 1] > 0 and most[index] > 0
              for index, (none, kept) in enumerate(zip(nobody, followed, strict=True))]  # fmt: skip
    pays = sum(follow) * (GOOD_ACCEPTANCE - price) > draft_price
    counts = [min(2 * whole[index, 1], most[index]) if follow[index] and pays else count
              for index, (_, count) in enumerate(plan)]  # fmt: skip
    return followed, counts


@pytest.mark.parametrize("seed", range(40))
def test_shares(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random records, costs and drafts. Fails if a depth's price is left out, if what is drafted behind a draft does
    not wait for that one to be right, if a stage that only begins drafts continues one, or if those who follow a draft
    that was right do not pay for that together."""
    rng = np.random.default_rng(seed)
    num_reqs, gate = int(rng.integers(1, NUM_ROWS)), Gate(learned(rng), K)
    monkeypatch.setattr(Gate, "_explored", lambda self, lengths, *rest: lengths)
    for _ in range(9):
        count = int(rng.integers(0, 9))
        gate.add_step(num_reqs, 20 + 0.4 * count + 0.5 * max(0, count - 2), 0.5, count, num_reqs + count // 2)
        gate.add_drafting(1, 4 * float(rng.random()), 1)
    [costs] = gate._costs.by_load.values()
    rows, max_draft = rng.permutation(NUM_ROWS)[:num_reqs], rng.integers(0, K + 1, num_reqs)
    token_ids = rng.integers(0, 9, (num_reqs, K)).astype(np.int32)
    found = of_stage(0, token_ids, rng.integers(0, max_draft + 1), rng.integers(1, 9, num_reqs) * 1.0)
    most, sure = np.minimum(max_draft, rng.integers(0, K + 1)), rng.integers(1, 9, num_reqs) * 1.0
    continues = bool(seed % 2)
    kept, own = gate.split_draft(rows, found, 1, sure[:, None] + np.arange(K), most, max_draft, continues)
    expected = expected_shares(gate, costs, rows, found, sure, most, max_draft, continues)
    assert (kept.tolist(), own.tolist()) == expected
