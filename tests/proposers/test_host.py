"""The compiled loops of the host against the operations on arrays that they stand for, and against plain counting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.proposers.accounts import Accounts
from vllm_specplugins.proposers.costs import StepCosts, worth_of_a_ms
from vllm_specplugins.proposers.drafted import Drafted, of_stage
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE, GOOD_ACCEPTANCE, Gate, depth_that_pays, worths
from vllm_specplugins.proposers.sent import Sent

K, NUM_STAGES, NUM_ROWS = 5, 3, 9


def random_drafts(rng: np.random.Generator, num_reqs: int) -> Drafted:
    """Of two stages, one behind the other."""
    parts = [
        of_stage(
            int(rng.integers(NUM_STAGES)),
            rng.integers(0, 99, (num_reqs, K)).astype(np.int32),
            rng.integers(0, K // 2 + 1, num_reqs),
            rng.integers(1, 9, num_reqs).astype(float),
        )
        for _ in range(2)
    ]
    return parts[0].followed_by(parts[1])


def plain_counts(drafts: Drafted, most: Sequence[int], stage: int) -> tuple[int, int]:
    """Tokens and drafts of a stage among the first tokens of each draft."""
    counts = [row[:length].tolist().count(stage) for row, length in zip(drafts.stage, most, strict=True)]
    return sum(counts), sum(map(bool, counts))


def test_accounts() -> None:
    """What was sent comes back once, as Sent says, in plain NumPy; counts are those of a plain loop. Fails if a row is
    mixed up, if fates are told twice, if a token that was not verified counts, or a draft once for each token."""
    rng = np.random.default_rng(1)
    accounts, sent = Accounts(NUM_STAGES, K), Sent(K, NUM_ROWS)
    accounts.make_room(NUM_ROWS)
    counters, plain = ([StageCounters() for _ in range(NUM_STAGES)] for _ in range(2))
    for _ in range(60):
        num_reqs = int(rng.integers(1, NUM_ROWS))
        rows, drafts = rng.permutation(NUM_ROWS)[:num_reqs], random_drafts(rng, num_reqs)
        lengths = drafts.num_draft.tolist()
        draft = accounts.put(rows, drafts)
        sent.put(rows, drafts)
        assert draft.num_draft.tolist() == lengths and draft.token_ids.shape[1] == max(lengths)
        assert draft.stage is not None and draft.confidence is not None
        for row, length in enumerate(lengths):
            assert draft.stage[row] == (drafts.stage[row, length - 1] if length else -1)
            assert draft.confidence[row] == (drafts.confidence[row, 0] if length else 0)
        verified = rng.integers(0, K + 1, num_reqs).astype(np.int32)
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        for is_told_again in (False, True):
            found = accounts.take(rows, verified, accepted)
            expected = sent.take(rows, verified, accepted)
            assert (found is None) == (is_told_again or not expected.num_draft.any())
            if found is not None:
                assert all((np.asarray(a) == b).all() for a, b in zip(found, expected, strict=True))
        known = np.minimum(verified, drafts.num_draft)
        for stage, own in enumerate(plain):
            kept, num_drafts = plain_counts(drafts, lengths, stage)
            own.kept, own.drafts = own.kept + kept, own.drafts + num_drafts
            own.verified += plain_counts(drafts, known.tolist(), stage)[0]
            own.accepted += plain_counts(drafts, np.minimum(known, accepted).tolist(), stage)[0]
        if rng.random() < 0.5:
            accounts.move_to(counters)
    accounts.move_to(counters)
    for found_stage, own in zip(counters, plain, strict=True):
        assert sum(found_stage.accepted_at) == found_stage.accepted
        for name in ("kept", "drafts", "verified", "accepted"):
            assert getattr(found_stage, name) == getattr(own, name) > 0


def expected_lengths(
    gate: Gate, costs: StepCosts, rows: np.ndarray, sure: np.ndarray, most: np.ndarray, prices: Sequence[float]
) -> list[int]:
    """What Gate.lengths chooses of stage 0, whose rival is stage 1, by operations on arrays."""
    price, rival_price, draft_price = prices
    places = np.arange(K)
    worth, lengths = worths(gate.records.chances(rows, 0, sure[:, None] + places), most, price)
    rivals = gate.records.chances(rows, 1, np.full((len(rows), K), FIRST_CONFIDENCE) + places)
    yields = worths(rivals, most, rival_price)[0].sum(axis=1) > worth.sum(axis=1)
    worth, lengths = np.where(yields[:, None], 0.0, worth), np.where(yields, 0, lengths)
    depth = depth_that_pays(worth.sum(axis=0)[: lengths.max(initial=0)], draft_price)
    lengths = np.minimum(lengths, min(depth, costs.longest))
    if price + draft_price / len(rows) < GOOD_ACCEPTANCE:
        followed = np.minimum(2 * gate.records.whole[rows, 0].astype(np.int64), most)
        lengths = np.where(lengths > 0, lengths, followed)
    found: list[int] = lengths.tolist()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_lengths(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random records and costs. Fails if a rival's price is another's, if a depth goes by one request's worth, or if a
    draft is followed beyond what may be drafted."""
    rng = np.random.default_rng(seed)
    gate, num_reqs = Gate(2, K), int(rng.integers(1, NUM_ROWS))
    gate.records.make_room(NUM_ROWS)
    monkeypatch.setattr(Gate, "_explored", lambda self, lengths, *rest: lengths)
    for _ in range(30):
        stage, lengths = np.tile(rng.integers(0, 2, (NUM_ROWS, 1)), K), rng.integers(0, K + 1, NUM_ROWS)
        right = np.minimum(rng.integers(0, 2 * K, NUM_ROWS), lengths)
        sure = rng.integers(1, 9, (NUM_ROWS, 1)) + np.arange(K) * 1.0
        gate.records.add(np.arange(NUM_ROWS), stage, sure, lengths, right)
    for _ in range(9):
        count = int(rng.integers(0, 9))
        gate.add_step(num_reqs, 20 + 0.4 * count, 0.5, count, num_reqs + count // 2)
        gate.add_drafting(0, 8 * float(rng.random()), 1)
        gate.add_drafting(1, 0.3, 1)
    [costs] = gate._costs.by_load.values()
    rate = worth_of_a_ms(costs, num_reqs)
    price = rate * costs.slope_ms
    prices = price, price + rate * gate._draft_ms[1] / num_reqs, rate * gate._draft_ms[0]
    rows, most = rng.permutation(NUM_ROWS)[:num_reqs], rng.integers(0, K + 1, num_reqs)
    sure = rng.integers(1, 9, num_reqs) * 1.0
    assert gate.lengths(rows, 0, sure, most, 1).tolist() == expected_lengths(gate, costs, rows, sure, most, prices)


def worth_of(chances: list[float], price: float) -> float:
    """Of tokens behind each other."""
    return sum(survival - price for survival in np.cumprod(chances).tolist())


def expected_shares(
    gate: Gate, costs: StepCosts, rows: Any, found: Drafted, sure: Any, most: Any, wanted: Any, continues: bool
) -> tuple[list[int], list[int]]:
    """By trying every depth, and for each request every draft that it allows."""
    rate = worth_of_a_ms(costs, len(rows))
    price, draft_price = rate * costs.slope_ms, rate * gate._draft_ms[1]
    own = [gate.records.chances(rows[i : i + 1], 1, sure[i] + np.arange(K)[None])[0].tolist() for i in range(len(rows))]
    plans = []
    for depth in range(min(K, costs.longest) + 1):
        total, plan = -depth * draft_price, []
        for index in range(len(rows)):
            had = [
                float(gate.records.chances(rows[index : index + 1], int(stage), np.full((1, 1), at))[0, 0])
                for stage, at in zip(found.stage[index], found.confidence[index], strict=True)
            ][: found.num_draft[index]]
            pays = sum(survival >= price for survival in np.cumprod(had))
            room = int(min(most[index], depth))
            drafts = [(0, count) for count in range(room + 1)]
            drafts += [(pays, count) for count in range(min(room, wanted[index] - pays) + 1 if continues else 1)]
            values = [worth_of(had[:kept] + own[index][:count], price) for kept, count in drafts]
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
    whole, followed = gate.records.whole[rows].astype(int), [kept for kept, _ in plan]
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
    gate, num_reqs = Gate(2, K), int(rng.integers(1, NUM_ROWS))
    gate.records.make_room(NUM_ROWS)
    monkeypatch.setattr(Gate, "_explored", lambda self, lengths, *rest: lengths)
    for _ in range(30):
        stage, lengths = np.tile(rng.integers(0, 2, (NUM_ROWS, 1)), K), rng.integers(0, K + 1, NUM_ROWS)
        right = np.minimum(rng.integers(0, 2 * K, NUM_ROWS), lengths)
        sure = rng.integers(1, 9, (NUM_ROWS, 1)) + np.arange(K) * 1.0
        gate.records.add(np.arange(NUM_ROWS), stage, sure, lengths, right)
    for _ in range(9):
        count = int(rng.integers(0, 9))
        gate.add_step(num_reqs, 20 + 0.4 * count, 0.5, count, num_reqs + count // 2)
        gate.add_drafting(1, 4 * float(rng.random()), 1)
    [costs] = gate._costs.by_load.values()
    rows, wanted = rng.permutation(NUM_ROWS)[:num_reqs], rng.integers(0, K + 1, num_reqs)
    token_ids = rng.integers(0, 9, (num_reqs, K)).astype(np.int32)
    found = of_stage(0, token_ids, rng.integers(0, wanted + 1), rng.integers(1, 9, num_reqs) * 1.0)
    most, sure = np.minimum(wanted, rng.integers(0, K + 1)), rng.integers(1, 9, num_reqs) * 1.0
    continues = bool(seed % 2)
    kept, own = gate.shares(rows, found, 1, sure, most, wanted, continues)
    expected = expected_shares(gate, costs, rows, found, sure, most, wanted, continues)
    assert (kept.tolist(), own.tolist()) == expected
