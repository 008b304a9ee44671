"""Parameters of requests, and distributions, for the tests of verification."""

import math
from collections.abc import Callable

import torch
from scipy.stats import chisquare

TEMPERATURES = torch.tensor([0.0, 0.7, 1.0, 1.6])
# By request state; limits alone and together, some of which keep everything.
TRUNCATIONS: dict[str, dict[str, torch.Tensor]] = {
    "whole": {},
    "top_k": {"top_k": torch.tensor([0, 5, 300, 1], dtype=torch.int32)},
    "top_p": {"top_p": torch.tensor([1.0, 0.9, 0.4, 0.99])},
    "min_p": {"min_p": torch.tensor([0.0, 0.002, 0.02, 0.3])},
}
TRUNCATIONS["all"] = TRUNCATIONS["top_k"] | TRUNCATIONS["top_p"] | TRUNCATIONS["min_p"]


def of_states(truncation: str, num_states: int) -> dict[str, torch.Tensor]:
    """Limits, and temperatures, of so many states."""
    limits = {"temperature": TEMPERATURES, **TRUNCATIONS[truncation]}
    places, rounds = torch.arange(num_states) % 4, torch.arange(num_states) // 4
    return {name: values[(places + i * rounds) % 4] for i, (name, values) in enumerate(limits.items())}


def conditional(seed: int, vocab_size: int, sharpness: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A distribution after every prefix, some tokens impossible; sharpness inf: one-hot."""

    def after(prefix: tuple[int, ...]) -> torch.Tensor:
        rng = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        drawn = torch.rand(vocab_size, generator=rng, dtype=torch.float64)
        if sharpness == math.inf:
            return (drawn == drawn.max()).double()
        drawn = (drawn**sharpness).masked_fill_(torch.rand(vocab_size, generator=rng) < 0.2, 0) + 1e-300
        return drawn / drawn.sum()

    return after


def p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Of chi-squared; 0 for a token that cannot be."""
    counts, law = torch.bincount(tokens, minlength=len(law)), law.double()
    if counts[law == 0].any():
        return 0.0
    expected = law[law > 0] / law.sum() * counts.sum()
    return float(chisquare(counts[law > 0].numpy(), expected.numpy()).pvalue)
