"""The compiled loops of the host against the operations on arrays that they stand for, and against plain counting."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_specplugins.draft import StageCounters
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


def on_tensors(drafts: Drafted) -> Drafted:
    return Drafted(*(torch.from_numpy(part) for part in drafts[:4]))


def plain_counts(drafts: Drafted, most: Sequence[int], stage: int) -> tuple[int, int]:
    """Tokens and drafts of a stage among the first tokens of each draft."""
    counts = [row[:length].tolist().count(stage) for row, length in zip(drafts.stage, most, strict=True)]
    return sum(counts), sum(map(bool, counts))


def test_accounts() -> None:
    """What was sent comes back once, as tensors' Sent says; counts are those of a plain loop. Fails if a row is mixed
    up, if fates are told twice, if a token that was not verified counts, or if a draft counts once for each token."""
    rng = np.random.default_rng(1)
    accounts, sent = Accounts(NUM_STAGES, K), Sent(K, NUM_ROWS, "cpu")
    accounts.make_room(NUM_ROWS)
    counters, plain = ([StageCounters() for _ in range(NUM_STAGES)] for _ in range(2))
    for _ in range(60):
        num_reqs = int(rng.integers(1, NUM_ROWS))
        rows, drafts = rng.permutation(NUM_ROWS)[:num_reqs], random_drafts(rng, num_reqs)
        lengths = drafts.num_draft.tolist()
        draft = accounts.put(rows, drafts)
        sent.put(torch.from_numpy(rows), on_tensors(drafts))
        assert draft.num_draft.tolist() == lengths and draft.token_ids.shape[1] == max(lengths)
        assert draft.stage is not None and draft.confidence is not None
        for row, length in enumerate(lengths):
            assert draft.stage[row] == (drafts.stage[row, length - 1] if length else -1)
            assert draft.confidence[row] == (drafts.confidence[row, 0] if length else 0)
        verified = rng.integers(0, K + 1, num_reqs).astype(np.int32)
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        for is_told_again in (False, True):
            found = accounts.take(rows, verified, accepted)
            expected = sent.take(*map(torch.from_numpy, (rows, verified, accepted)))
            assert (found is None) == (is_told_again or not expected.num_draft.any())
            if found is not None:
                assert all((np.asarray(a) == b.numpy()).all() for a, b in zip(found, expected, strict=True))
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
    lengths = np.minimum(lengths, min(depth, int(costs.weight)))
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
    [costs] = gate._costs.values()
    rate = worth_of_a_ms(costs, num_reqs)
    price = rate * costs.slope_ms
    prices = price, price + rate * gate._draft_ms[1] / num_reqs, rate * gate._draft_ms[0]
    rows, most = rng.permutation(NUM_ROWS)[:num_reqs], rng.integers(0, K + 1, num_reqs)
    sure = rng.integers(1, 9, num_reqs) * 1.0
    assert gate.lengths(rows, 0, sure, most, 1).tolist() == expected_lengths(gate, costs, rows, sure, most, prices)
