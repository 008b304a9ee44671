"""Drafts drawn with the noise of verification: where the proposer knows the target, they are what the target says."""

import pytest
import torch
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
from vllm_specplugins.kernels.rejection.coupled import coupled_sample

NUM_REQS, VOCAB_SIZE = 400, 700
STATES = torch.arange(NUM_REQS)
LIMITS = {
    "whole": {},
    "truncated": {
        "top_k": torch.tensor([0, 5, 300, 1] * (NUM_REQS // 4), dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.9, 0.4, 0.99] * (NUM_REQS // 4)),
        "min_p": torch.tensor([0.0, 0.002, 0.02, 0.1] * (NUM_REQS // 4)),
    },
}


def verified(logits: torch.Tensor, drafts: torch.Tensor, positions: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[NUM_REQS] the first token that verification of one draft a request emits."""
    rows = torch.stack([logits, logits], dim=1).flatten(0, 1)
    fed = torch.stack([torch.zeros_like(drafts), drafts], dim=1).flatten()
    places = torch.stack([positions, positions + 1], dim=1).flatten()
    starts = torch.arange(0, 2 * NUM_REQS + 1, 2, dtype=torch.int32)
    return rejection_sample(rows, starts, fed, places, STATES, sampling, max_num_draft=1)[0][:, 0]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_a_right_guess_is_accepted(temperature: float, limits: str) -> None:
    """At every temperature and under every limit. Kills: noise of another stream or position; limits left out."""
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(NUM_REQS, VOCAB_SIZE, generator=rng) * 3
    positions = torch.randint(1, 2**40, (NUM_REQS,), generator=rng)
    sampling = Sampling(torch.full((NUM_REQS,), temperature), STATES * 77, **LIMITS[limits])
    drafts = coupled_sample(logits, positions, sampling)
    assert torch.equal(verified(logits, drafts, positions, sampling), drafts)


def test_a_near_guess_is_accepted_more_often_than_the_likeliest_token() -> None:
    """And the less the guess is off, the oftener; at most as often as any draft can be, the overlap of p and q."""
    rng = torch.Generator().manual_seed(6)
    logits = torch.randn(NUM_REQS, VOCAB_SIZE, generator=rng) * 2.5
    error = torch.randn(NUM_REQS, VOCAB_SIZE, generator=rng)
    positions = torch.randint(1, 2**40, (NUM_REQS,), generator=rng)
    sampling = Sampling(torch.ones(NUM_REQS), STATES * 77)

    def accepted(drafts: torch.Tensor) -> float:
        return float((verified(logits, drafts, positions, sampling) == drafts).float().mean())

    likeliest = accepted(logits.argmax(-1))
    rates = [accepted(coupled_sample(logits + scale * error, positions, sampling)) for scale in (1.0, 0.3, 0.1)]
    assert likeliest < rates[1] < rates[2]
    assert rates[0] < rates[1]
    p, q = torch.softmax(logits, -1), torch.softmax(logits + 0.3 * error, -1)
    overlap = float(torch.minimum(p, q).sum(-1).mean())
    assert 0.6 * overlap < rates[1] < overlap + 3 * (0.25 / NUM_REQS) ** 0.5
