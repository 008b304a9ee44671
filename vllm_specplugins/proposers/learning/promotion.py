"""Whether one part drafts better than another: expected acceptance lengths on the same held-out windows, paired.

What a mean promises is judged by tenant, too, so that one that floods the engine cannot have weights promoted that are
worse for the others. N: windows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.proposers.heads.distillation import Guess, Guesser, States, walk

Floats = npt.NDArray[np.float64]
DEVIATIONS = 2.5  # of the mean difference, that it must lie from 0
LEAST_WINDOWS = 16  # to judge by
OWN_WINDOWS = 8  # of a tenant that is judged by itself; the others are judged together


def acceptance_length(
    states: States,
    full: torch.Tensor,  # [T, V] the target's own logits
    next_ids: torch.Tensor,  # [T]
    temperature: float,
    guesser: Guesser,
    num_draft: int,
) -> float:
    """Expected tokens of a step in a window, the target's own included: an engine's acceptance length.

    Of what was emitted, a draft's token is accepted where it is the same (temperature 0), or with probability
    min(1, q / p) (Leviathan et al. 2023). Filters of the request, such as top-p, are not known here.
    """
    guesses = list(guesser(states, num_draft))
    num_drafts = len(guesses[-1].logits)
    kept = torch.stack([_accepted(guess, full, next_ids, temperature)[:num_drafts] for guess in guesses])
    tokens, steps = walk(kept)
    return tokens / steps


def _accepted(guess: Guess, full: torch.Tensor, next_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N] probability that each token of a guess is accepted."""
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
    """Differences in acceptance length, of one part's to another's, by window [N], and whose the windows are.

    >>> better = Comparison(np.array([0.2, 0.3] * 10), np.zeros(20, int))
    >>> better.is_better, better.is_worse
    (True, False)
    """

    differences: Floats
    tenants: npt.NDArray[np.int64]

    @property
    def is_better(self) -> bool:
        """Surely better in the mean, and for no tenant worse, as far as was seen."""
        low, _ = _bounds(self.differences)
        return low > 0 and all(own.mean() >= 0 for own in self._groups())

    @property
    def is_worse(self) -> bool:
        """Surely worse in the mean, or for some tenant."""
        return not np.isfinite(self.differences).all() or any(
            _bounds(own)[1] < 0 for own in (self.differences, *self._groups())
        )

    def _groups(self) -> Iterator[Floats]:
        _, owners, counts = np.unique(self.tenants, return_inverse=True, return_counts=True)
        is_small = (counts < OWN_WINDOWS)[owners]
        groups = np.where(is_small, -1, owners)
        for group in np.unique(groups):
            yield self.differences[groups == group]


def _bounds(differences: Floats) -> tuple[float, float]:
    """Of the mean."""
    num = len(differences)
    if num < OWN_WINDOWS:
        return -math.inf, math.inf
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(num)
    return mean - DEVIATIONS * error, mean + DEVIATIONS * error
