"""Decides whether one part drafts better than another, by a paired comparison of acceptance lengths on held-out
windows. Tenants are also compared one by one, so a tenant that floods the engine cannot promote weights that are worse
for others. N: windows, T: tokens of a window, K: draft tokens, V: vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.proposers.learning.distillation import Guess, Guesser, States, walk

Floats = npt.NDArray[np.float64]
DEVIATIONS = 2.5  # standard errors between the mean difference and 0
MIN_WINDOWS = 16  # of a comparison
MIN_TENANT_WINDOWS = 8  # tenants with fewer windows are compared together


def acceptance_length(
    states: States,
    full: torch.Tensor,  # [T, V] the target's logits
    next_ids: torch.Tensor,  # [T]
    temperature: float,
    guesser: Guesser,
    num_draft: int,
) -> float:
    """Returns the expected tokens per step in a window, including the target's token: an engine's acceptance length. A
    draft token is accepted if it is the emitted one (temperature 0), or with the probability min(1, q / p) of the
    emitted one (Leviathan et al. 2023). This ignores the request's filters, such as top-p."""
    guesses = list(guesser(states, num_draft))
    num_drafts = len(guesses[-1].logits)
    accept_probs = torch.stack([_accept_probs(guess, full, next_ids, temperature)[:num_drafts] for guess in guesses])
    tokens, steps = walk(accept_probs)
    return tokens / steps


def _accept_probs(guess: Guess, full: torch.Tensor, next_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    emitted = guess.of(next_ids)
    if temperature == 0:
        return (guess.logits.argmax(-1) == emitted).float()
    q, p = (
        (logits.float() / temperature).log_softmax(-1).gather(-1, emitted[:, None])[:, 0]
        for logits in (guess.logits, guess.of(full))
    )
    return (q - p).exp().clamp(max=1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between the acceptance lengths of two parts, by window, and the tenants of the windows, [N] each.

    >>> better = Comparison(np.array([0.2, 0.3] * 10), np.zeros(20, int))
    >>> better.is_better, better.is_worse
    (True, False)
    """

    differences: Floats
    tenants: npt.NDArray[np.int64]

    @property
    def is_better(self) -> bool:
        """Returns whether the mean is significantly above 0, and no tenant's mean is below 0."""
        low, _ = _bounds(self.differences)
        return low > 0 and all(group.mean() >= 0 for group in self._groups())

    @property
    def is_worse(self) -> bool:
        """Returns whether the mean or a tenant's mean is significantly below 0, or a difference is not finite."""
        return not np.isfinite(self.differences).all() or any(
            _bounds(group)[1] < 0 for group in (self.differences, *self._groups())
        )

    def _groups(self) -> Iterator[Floats]:
        _, owners, counts = np.unique(self.tenants, return_inverse=True, return_counts=True)
        is_small = (counts < MIN_TENANT_WINDOWS)[owners]
        groups = np.where(is_small, -1, owners)
        for group in np.unique(groups):
            yield self.differences[groups == group]


def _bounds(differences: Floats) -> tuple[float, float]:
    num = len(differences)
    if num < MIN_TENANT_WINDOWS:
        return -math.inf, math.inf
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(num)
    return mean - DEVIATIONS * error, mean + DEVIATIONS * error
