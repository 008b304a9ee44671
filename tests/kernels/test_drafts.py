"""Drafts drawn under the requests' own parameters: with the noise of verification, or with their own and q.

Where the proposer knows the target, they are what the target says. The kernels run in Triton's interpreter, which has
to be chosen before Triton is imported: a process of its own.
"""

import doctest
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
from vllm_specplugins.kernels.rejection import drafts as module
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, sample_with_q

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import DEVICE, RUNS, needs_triton

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


by_reference = pytest.mark.skipif(RUNS, reason="of the reference, which the kernels are held against")


@by_reference
def test_docstrings() -> None:
    assert doctest.testmod(module).failed == 0


def verified(logits: torch.Tensor, drafts: torch.Tensor, positions: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[NUM_REQS] the first token that verification of one draft a request emits."""
    rows = torch.stack([logits, logits], dim=1).flatten(0, 1)
    fed = torch.stack([torch.zeros_like(drafts), drafts], dim=1).flatten()
    places = torch.stack([positions, positions + 1], dim=1).flatten()
    starts = torch.arange(0, 2 * NUM_REQS + 1, 2, dtype=torch.int32)
    return rejection_sample(rows, starts, fed, places, STATES, sampling, max_num_draft=1)[0][:, 0]


@by_reference
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


@by_reference
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


def verified_with_q(
    logits: torch.Tensor, drafts: torch.Tensor, q: torch.Tensor, positions: torch.Tensor, sampling: Sampling
) -> float:
    """The share of drafts, one a request, that verification accepts."""
    rows, num_reqs = logits.repeat_interleave(2, dim=0), len(logits)
    fed = torch.stack([torch.zeros_like(drafts), drafts], dim=1).flatten()
    places = torch.stack([positions, positions + 1], dim=1).flatten()
    starts, states = torch.arange(0, 2 * num_reqs + 1, 2, dtype=torch.int32), torch.arange(num_reqs)
    _, num_sampled = rejection_sample(rows, starts, fed, places, states, sampling, 1, q[:, None])
    return float((num_sampled == 2).float().mean())


def of_requests(seed: int, num_reqs: int = NUM_REQS) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_reqs, VOCAB_SIZE, generator=rng) * 3
    return logits, torch.randint(1, 2**40, (num_reqs,), generator=rng)


@by_reference
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_a_right_q_is_accepted(temperature: float, limits: str) -> None:
    """Kills: a q that knows no limits, of which verification rejects a share; one cut elsewhere than p."""
    logits, positions = of_requests(7)
    sampling = Sampling(torch.full((NUM_REQS,), temperature), STATES * 77, **LIMITS[limits])
    own = Sampling(sampling.temperature, sampling.seeds + 1, **LIMITS[limits])
    drafts, q = sample_with_q(logits, positions, own)
    assert verified_with_q(logits, drafts, q, positions, sampling) == 1.0
    uncut, whole = sample_with_q(logits, positions, Sampling(own.temperature, own.seeds))
    share = verified_with_q(logits, uncut, whole, positions, sampling)
    assert (share < 0.99) == (limits == "truncated" and temperature > 0), "the test must see limits that are left out"


@by_reference
def test_tokens_follow_q() -> None:
    """Chi-squared. Kills: a draw from what was cut; a temperature applied twice."""
    num_draws = 100_000
    logits = torch.linspace(-2, 2, 16).expand(num_draws, -1)
    sampling = Sampling(torch.full((num_draws,), 0.7), torch.arange(num_draws), min_p=torch.full((num_draws,), 0.05))
    drafts, q = sample_with_q(logits, torch.full((num_draws,), 9), sampling)
    law = torch.softmax(q[0].double() / 0.7, 0) * num_draws
    counts, kept = torch.bincount(drafts, minlength=16), law > 0
    assert 1 < kept.sum() < 16 and not counts[~kept].any()
    assert chisquare(counts[kept].numpy(), law[kept].numpy()).pvalue > 1e-4


@by_reference
def test_what_is_no_number_stays() -> None:
    """Kills: a cut that hides NaN from verification, which then takes the draft for a sample of q."""
    logits, positions = of_requests(8, 4)
    logits[:, 3] = torch.nan
    limits = {name: values[:4] for name, values in LIMITS["truncated"].items()}
    _, q = sample_with_q(logits, positions, Sampling(torch.ones(4), STATES[:4], **limits))
    assert q[:, 3].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_equals_reference(dtype: torch.dtype) -> None:
    """Kills: a limit of another row; one that the kernel does not write."""
    num_reqs = 24
    logits, positions = of_requests(9, num_reqs)
    heat = torch.tensor([0.7, 1.3, 1.0]).repeat(num_reqs // 3)
    limits = {name: values[:num_reqs] for name, values in LIMITS["truncated"].items()}
    given = logits.to(dtype), positions, Sampling(heat, STATES[:num_reqs] * 5, **limits)
    expected = sample_with_q(*given, implementation="reference")
    sampling = Sampling(*(values.to(DEVICE) for values in vars(given[2]).values()))
    ours = sample_with_q(given[0].to(DEVICE), positions.to(DEVICE), sampling, implementation="fused")
    for own, theirs in zip(ours, expected, strict=True):
        assert torch.equal(own.cpu(), theirs)
