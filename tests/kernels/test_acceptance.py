"""The acceptance model: compares the reference with synthetic texts, and Triton with the reference, in few variants.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
The host's form: tests/gate/test_gate_numba.py.
"""

from typing import Any

import pytest
import torch
from interpreted import DEVICE, needs_triton
from launch_keys import recorded
from vllm_specplugins.kernels.acceptance import Drafts, Other, State, host, observe, predict, worth
from vllm_specplugins.kernels.acceptance.reference import _bins, clear, new_state
from vllm_specplugins.kernels.inputs import make_outcomes
from vllm_specplugins.kernels.rejection.inputs import to_device

POISON = 77.0
RELIABILITY = 0.05


def run(steps: list[Any], num_stages: int, width: int, implementation: str) -> tuple[list[Any], State]:
    """What each step returns and writes; the state in the end."""
    device = DEVICE if implementation == "fused" else "cpu"
    actual, state = [], new_state(num_stages, 2 * len(steps[0][0]) + 1, width, device)
    for index, step in enumerate(steps):
        slots, drafts, sampled, rejected = to_device(step, device)
        accept_probs = torch.full(drafts.stage.shape, POISON, dtype=torch.float64, device=device)
        reports = torch.full((len(state.tried), 2), POISON, device=device)
        other = Other(num_stages - 1, index % (width + 1), index % 2 == 0, (slots % 4).int())
        actual += worth(state, slots, drafts, other if index % 5 else None, reports, implementation)
        actual.append(reports)
        tables = tuple(torch.full((2, *state.sent_stage.shape), POISON, device=device)) if index % 2 else ()
        predict(state, slots, drafts, accept_probs, implementation, tables=tables)
        actual += tables
        observe(state, slots, sampled, rejected, implementation)
        actual.append(accept_probs)
        if index == len(steps) // 2:
            clear(state, slots[:1])
    return actual, state


def assert_same(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", [1, 2])
def test_stages_are_observed_apart(seed: int) -> None:
    """Matches that mean less than they seem, and a drafter that gets worse along a draft, in texts that change: on
    average each has its rate. Kills: one model for both stages, a token after a rejected one that counts."""
    rng, K, num_rows, results = torch.Generator().manual_seed(seed), 6, 8, []
    state, places = new_state(2, num_rows, K, "cpu"), torch.arange(K)
    for step in range(400):
        rows = torch.randperm(num_rows, generator=rng)[: 1 + step % num_rows]
        highs = 2, K + 1, K + 1, 11
        stage, num_draft, limit, match = (torch.randint(high, rows.shape, generator=rng) for high in highs)
        is_match, stages = stage[:, None] == 0, stage[:, None].repeat(1, K)
        drafts = Drafts(num_draft, stages, torch.where(is_match, 1 + match[:, None], 1) + places)
        easy = 0.25 * ((rows + step // 100) % 2)[:, None]
        probs = torch.where(is_match, 0.3 + easy, 0.7 + easy - 0.1 * places)
        is_right = torch.rand(stages.shape, generator=rng) < probs
        verified = torch.minimum(num_draft, limit)
        accepted = torch.minimum(is_right.cumprod(dim=1).sum(dim=1), verified)
        predict(state, rows, drafts, accept_probs := torch.empty(stages.shape))
        assert ((accept_probs > 0) == (places < num_draft[:, None])).all()
        observe(state, rows, accepted + 1, verified - accepted)
        is_tried = (places < verified[:, None]) & (places <= accepted[:, None])
        results.append(torch.stack((accept_probs, places < accepted[:, None], stages))[:, is_tried])
    accept_probs, is_accepted, stages = torch.cat(results, dim=1)
    for stage in (0, 1):
        assert abs((accept_probs - is_accepted)[stages == stage].mean()) < RELIABILITY


def test_bins() -> None:
    """Kills: a probability that counts as the length of a match, a bin that ends a token or a hair elsewhere."""
    confidence = torch.tensor([1.0, 2, 3, 4, 5, 31, 32, 0.0, 0.75, 0.751, 1 - 1 / 25, 0.9999], dtype=torch.float64)
    bins = [0, 0, 1, 1, 2, 4, 5, 0, 0, 1, 2, 5]
    assert _bins(confidence).tolist() == [host.bin_of(each) for each in confidence.tolist()] == bins


@needs_triton
@pytest.mark.parametrize(
    ("num_rows", "num_stages", "width"), [(1, 1, 1), (1, 2, 5), (3, 1, 8), (9, 3, 3), (70, 2, 5), (131, 1, 2)]
)
def test_equals_reference(num_rows: int, num_stages: int, width: int) -> None:
    """To 1e-9, over tiles of rows. Fails if tokens behind the first rejected one, or of another stage, are learned
    from; if a tile or a decay is left out of the record of all; if a row of padding counts, or a draft's
    end does not hold; if one step adds more to the record of all than it may."""
    steps = make_outcomes(5 if num_rows > 9 else 16, num_rows, num_stages, width, seed=num_rows)
    (actual, state), (expected, known) = (run(steps, num_stages, width, name) for name in ("fused", "reference"))
    assert_same(actual, expected)
    assert_same(state[:5], known[:5])
    if num_rows > 1:
        counts = torch.cat([part for part in expected if part.dtype == torch.int32])
        assert 0 < int((counts > 0).sum()) < len(counts)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("fused", marks=needs_triton)])
def test_among_equals(implementation: str) -> None:
    """Tokens that are as likely as the other stage's stay. Fails if the other stage gets them."""
    state, lengths = new_state(1, 5, 4, DEVICE), torch.arange(5, device=DEVICE)
    state.shared_accepted.copy_(0.5 * state.shared_tried)
    drafts = Drafts(lengths, torch.zeros(5, 4, dtype=torch.int32, device=DEVICE), torch.ones(5, 4, device=DEVICE))
    other = Other(0, 4, True, torch.ones_like(lengths).int())
    assert worth(state, lengths, drafts, other, None, implementation).num_kept.tolist() == lengths.tolist()


@needs_triton
def test_whole_numbers() -> None:
    """A lookup's confidences. Fails if they are taken for another type."""
    [(slots, drafts, *outcome)] = make_outcomes(1, 6, 1, 4)
    step = slots, drafts._replace(confidence=drafts.confidence.long()), *outcome
    assert_same(run([step], 1, 4, "fused")[0], run([step], 1, 4, "reference")[0])


@needs_triton
def test_few_variants() -> None:
    """Of what batches may be. Fails if a number of rows, of slots or of tokens to draft is compiled for."""
    with recorded("vllm_specplugins.kernels", runs=False) as keys:
        for num_rows in (1, 2, 7, 16, 33):
            for all_slots, all_drafts, *outcome in make_outcomes(2, num_rows, 2, 5):
                state = new_state(2, 2 * num_rows + 1, 5, DEVICE)
                for first in range(min(2, num_rows)):
                    slots, sampled, rejected = (tensor[first:] for tensor in (all_slots, *outcome))
                    drafts = Drafts(*(part[first:].clone() for part in all_drafts))
                    observe(state, slots, sampled, rejected, "fused")
                    predict(state, slots, drafts, torch.zeros(num_rows, 5)[first:], "fused")
                    for depth in (1, 4):
                        worth(state, slots, drafts, Other(depth % 2, depth, True, sampled), None, "fused")
    assert sorted(name for name, _ in keys) == ["_observe_kernel", "_predict_kernel", "_worth_kernel"]
