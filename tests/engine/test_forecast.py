"""What budgets of verification go by: what drafts are expected to be worth, and what steps cost."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RUNNER

if RUNNER != "v2":
    pytest.skip("V1 trims nothing on a device", allow_module_level=True)

from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_specplugins.engine.adaptive.budget import AcceptProbs, Budget
from vllm_specplugins.gate.budget import UNKNOWN, Costs, StepBudget, best_budget

S, K = 12, 3
NOTHING, FOUND = [0.0, 0.0, 0.0], [0.9, 0.8, 0.0]
STEEP = 1.0 + 0.2 * np.arange(200.0)  # ms by tokens


def manager(verify_ms: Any = STEEP, most: int = 1 << 20, num_slots: int = S, width: int = K) -> Any:
    """vLLM's, of requests that all decode; its slots are their names."""
    own: Any = object.__new__(AdaptiveVerificationManager)
    own.req_states = SimpleNamespace(
        max_num_reqs=num_slots, req_id_to_index={str(slot): slot for slot in range(num_slots)},
        num_speculative_steps=width, num_computed_tokens_np=np.full(num_slots, 9, np.int32),
        prefill_len=SimpleNamespace(np=np.full(num_slots, 4, np.int32)), max_num_batched_tokens=16384,
    )  # fmt: skip
    own.num_speculative_steps, own.num_bonus_tokens, own._max_total_logits = width, 1, most
    own._cu_num_logits, own.query_start_loc = torch.zeros(2, num_slots + 1, dtype=torch.int32)
    own._confidence_probs, own.cost_tables = torch.ones(num_slots, width), (np.full(num_slots + 1, 0.1), verify_ms)
    own._stale_confidences, own._stale_idx, own._pending_resets = (
        [SimpleNamespace(np=np.ones((num_slots, width), np.float32))],
        0,
        [],
    )
    return own


def probs(num_slots: int = S, width: int = K) -> AcceptProbs:
    host = torch.ones(num_slots + 1, width)
    return AcceptProbs(torch.ones(num_slots + 1, width), host, host.numpy())


def budgets(slots: list[int], steps: list[list[list[float]]]) -> list[int]:
    """Of each of these requests alone, after these steps, where a token must survive with more than a third."""
    found, gain, typical = np.zeros((S, K)), np.zeros(S), np.zeros(K)
    had, is_new = np.zeros(S, bool), np.zeros(S, bool)
    flat = np.concatenate((np.full(1, 1.0), 1.0 + 0.5 * np.arange(1.0, 61.0)))
    for step in steps:
        known = np.zeros((S, K), np.float32)
        known[slots] = step
        records, step_of = (known, found, gain, had, is_new, typical), (np.array([K]), 1, 1, 0.0, flat, 0.0, K)
        each = [best_budget(*records, np.array([slot]), *step_of) for slot in slots]
    return each


def test_a_request_is_expected_to_find_what_it_found() -> None:
    """Fails if one that never finds anything gets a budget, if what one finds is another's, or if a step in which
    something was found tells of one in which nothing was."""
    turns = [[NOTHING, NOTHING, FOUND], [FOUND, NOTHING, FOUND]] * 20
    assert budgets([2, 0, 3], [*turns, [NOTHING] * 3]) == [2, 0, 0]


def test_a_poor_draft_tells_of_a_better_one() -> None:
    """Beside a drafter there is always a draft, and a lookup's comes after a poor one. Fails if only a step without any
    draft tells of the next one, or if a request whose drafts are all poor is expected to have a better one."""
    poor = [0.2] * K
    turns = [[poor, poor, FOUND], [FOUND, poor, FOUND]] * 20
    assert budgets([2, 0, 3], [*turns, [poor] * 3]) == [2, 0, 0]


def test_as_vllm_chooses() -> None:
    """Budgets of whole batches and of others, if nothing is forecast. Fails if a token's
    chance stands for its survival, if a request's are another's, or if the table is read beside its place."""
    rng = np.random.default_rng(0)
    for most in (1 << 20, 9):
        for _ in range(50):
            ours, theirs, known = manager(most=most), manager(most=most), probs()
            budget = Budget(ours, known)
            budget._rule.is_new[:] = False
            known.host[:S] = theirs._stale_confidences[0].np[:] = rng.random((S, K)).astype(np.float32) ** 0.3
            names = [str(slot) for slot in rng.permutation(S)[:5]]
            whole = rng.random() < 0.5
            drafts = {name: [0] * (K if whole else int(rng.integers(0, K + 1))) for name in names}
            tokens = {name: len(drafts[name]) + (1 if whole else int(rng.integers(1, 3))) for name in names}
            theirs.cost_tables = ours.cost_tables
            assert ours.get_num_tokens(tokens, drafts) == theirs.get_num_tokens(tokens, drafts)
            assert budget.num_verified == theirs._batch_budget[2]


@pytest.mark.parametrize("each", [[K, K], [K, 1], [K - 1, K, K - 2]])
def test_what_costs_nothing_is_not_trimmed(each: list[int]) -> None:
    """Nothing is launched then, and the layout is that of all drafts. Fails if a token is trimmed that costs nothing,
    or if a row begins elsewhere, as where drafts that are as long as the first on average count as equally long."""
    own = manager(verify_ms=np.full(200, 5.0))
    budget = Budget(own, probs())
    budget._share = None  # type: ignore[assignment]
    own._confidence_probs.zero_()
    lengths = np.array(each)
    names, num_tokens = ["4", "7", "1"][: len(each)], 1 + lengths
    drafts = {name: [0] * int(length) for name, length in zip(names, lengths, strict=True)}
    assert own.get_num_tokens({n: 1 + len(d) for n, d in drafts.items()}, drafts) == num_tokens.sum()
    starts = np.concatenate(([0], num_tokens.cumsum())).astype(np.int32)
    assert own.compact_batch(lengths, num_tokens, starts)[0] is num_tokens
    found, _, admitted = own.reallocate_drafts(names, torch.tensor(list(map(int, names))))[:3]
    assert found.tolist() == starts.tolist() and admitted == lengths.sum()


def test_a_draft_that_is_not_known() -> None:
    """It is expected to gain what the request's drafts gain after poor ones, and a new request what all drafts do on
    average; in a trial, where no draft is known, their first tokens are verified. Fails if a new request's draft counts
    as right, if a trial that follows prose verifies nothing, as drafts would end for good, or if such drafts are learnt
    from."""
    rule, flat = StepBudget(S, K), 1.0 + np.concatenate((np.zeros(1), 0.5 * np.arange(1.0, 60.0)))
    costs = Costs(0.0, flat)
    unknown, known = np.full((S, K), UNKNOWN, np.float32), np.full((S, K), 0.1, np.float32)
    for number in range(1000):
        probs = known if number > 1 else np.zeros_like(known)  # only after a poor draft a request is not new
        rule.choose(costs, 1, [K], K, lambda probs=probs: (probs, np.array([2]), 1))
    typical = rule.typical.copy()
    assert typical.tolist() == pytest.approx([0.1, 0.01, 0.001], rel=0.05)
    rule.clear(3)
    mixed = np.where(np.arange(S)[:, None] == 3, unknown, known)
    assert rule.choose(costs, 2, [K, K], 2 * K, lambda: (mixed, np.array([2, 3]), 2)) == 0
    assert rule.typical.tolist() == pytest.approx(typical.tolist(), rel=0.01)
    assert rule.choose(costs, 2, [K, K], 2 * K, lambda: (unknown, np.array([2, 3]), 2)) == 2
    assert rule.is_new[3] and not rule.mean_survival[3].any() and rule.mean_gain[2] == pytest.approx(0.111, abs=0.001)


def test_a_new_request() -> None:
    """Its draft is not known. Fails if it has what its slot's last one had."""
    own, known = manager(), probs()
    budget = Budget(own, known)
    known.host[:], known.newest[:] = 0.0, 0.0
    budget._rule.is_new[3], budget._rule.was_poor[3] = False, True
    own.add_request(3)
    assert known.host[3].tolist() == known.newest[3].tolist() == [UNKNOWN] * K and not known.host[4].any()
    rule = budget._rule
    assert rule.is_new[3] and not rule.was_poor[3]
    assert own._pending_resets == []


def test_what_is_edited_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of edited logits a step holds a copy, of so many rows. Fails if a step with edits verifies more, if one without
    verifies as few, or if one that is smaller asks."""
    monkeypatch.setattr("vllm_specplugins.engine.adaptive.budget.EDITED_ROWS", 20)
    own, asked, edits = manager(verify_ms=np.full(200, 5.0)), [], True

    def edits_any(slots: Any) -> bool:
        asked.append(slots.tolist())
        return edits

    Budget(own, probs(), edits_any)
    for num_reqs, verified in ((12, 20), (5, 20), (12, 48)):
        names = [str(slot) for slot in range(num_reqs)]
        drafts = {name: [0] * K for name in names}
        assert own.get_num_tokens(dict.fromkeys(names, 1 + K), drafts) == verified
        edits = False
    assert asked == [[*range(12)]] * 2
