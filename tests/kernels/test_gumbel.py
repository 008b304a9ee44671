"""Gumbel-max sampling with counter-based noise: its distribution, and what a draw may depend on."""

import doctest

import pytest
import torch
from scipy.stats import chisquare, kstest
from vllm_specplugins.kernels import gumbel
from vllm_specplugins.kernels.gumbel import gumbel_sample, reference
from vllm_specplugins.kernels.gumbel.reference import exponential

NUM_DRAWS = 200_000


def draws(logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows = logits.expand(len(seeds), -1)
    return gumbel_sample(rows, torch.full((len(seeds),), temperature), seeds, positions)


@pytest.mark.parametrize("module", [gumbel, reference], ids=lambda module: module.__name__)
def test_docstrings(module) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_distribution(vary: str, temperature: float) -> None:
    """Chi-squared over 16 tokens. Kills: noise that ignores the position or repeats over seeds; a wrong temperature."""
    logits = torch.linspace(-2, 2, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    counter, constant = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 12345)
    seeds, positions = (counter, constant) if vary == "seeds" else (constant, counter)
    counts = torch.bincount(draws(logits, temperature, seeds, positions), minlength=16)
    expected = torch.softmax(logits.double() / temperature, 0) * NUM_DRAWS
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4
    wrong = torch.softmax(logits.double() / (temperature * 1.05), 0) * NUM_DRAWS
    assert chisquare(counts.numpy(), wrong.numpy()).pvalue < 1e-4, "the test must see a temperature 5 % off"


def test_noise_is_exponential_and_fine_near_zero() -> None:
    """Kolmogorov-Smirnov; the smallest of 2**22 noises, which decide, are distinct. Kills: 24-bit uniforms there."""
    noise = exponential(torch.arange(4), torch.zeros(4, dtype=torch.int64), 1 << 20).flatten()
    assert (noise > 0).all() and noise.isfinite().all()
    assert kstest(noise[::16].numpy(), "expon").pvalue > 1e-4
    smallest = noise.sort().values[:1000]
    assert len(smallest.unique()) > 990


def test_independent_of_the_batch() -> None:
    """Kills: noise by row index."""
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    temperature, seeds, positions = torch.linspace(0, 2, 8), torch.arange(8) * 77, torch.arange(8)
    together = gumbel_sample(logits, temperature, seeds, positions)
    alone = [gumbel_sample(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
             for i in range(8)]  # fmt: skip
    assert together.tolist() == [int(token) for token in alone]
    assert together[0] == logits[0].argmax(), "temperature 0"


def test_neighbours_are_uncorrelated() -> None:
    """Pairs of draws at neighbouring positions. Kills: a counter that shifts the noise instead of changing it."""
    seeds, positions = torch.full((NUM_DRAWS,), 5), torch.arange(NUM_DRAWS)
    tokens = draws(torch.zeros(4), 1.0, seeds, positions)
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chisquare(pairs.numpy()).pvalue > 1e-4
