"""Counts of outcomes against their probabilities: chi-squared with rare outcomes merged.

An outcome is t tokens; counts and probabilities are arrays [V] * t (V: vocab_size), one for each group of samples that
were drawn alike. Knows nothing of engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_EXPECTED = 5.0  # below it the chi-squared distribution is a poor approximation


@dataclass(frozen=True, slots=True)
class ChiSquared:
    """A test of goodness of fit.

    Args:
        statistic: sum of (observed - expected)^2 / expected; infinite if something impossible was observed.
        num_free: degrees of freedom; 0 if everything is certain.
        p_value: how probable a statistic of this size or more is if the probabilities are right.
        num_impossible: how often something was observed that cannot be.
    """

    statistic: float
    num_free: int
    p_value: float
    num_impossible: int = 0


def chi_squared(groups: Sequence[tuple[Counts, Floats, Floats]]) -> ChiSquared:
    """Tests the counts of all groups together.

    Args:
        groups: counts, probabilities, and the probabilities of what must not be called impossible, for each group.

    >>> probs = np.array([0.5, 0.3, 0.2])
    >>> chi_squared([(np.array([55, 28, 17]), probs, probs)])
    ChiSquared(statistic=1.083..., num_free=2, p_value=0.581..., num_impossible=0)
    """
    num_impossible = sum(int(counts[possible == 0].sum()) for counts, _, possible in groups)
    statistic, num_free = float("inf") if num_impossible else 0.0, 0
    for counts, probs, _ in groups:
        observed, expected = merge(counts, probs * counts.sum())
        statistic += float(((observed - expected) ** 2 / expected).sum())
        num_free += len(observed) - 1
    # The probability that a chi-squared variable with so many degrees of freedom exceeds the statistic.
    half_free, half = (torch.tensor(x / 2, dtype=torch.float64) for x in (num_free, statistic))
    p_value = float(torch.special.gammaincc(half_free, half)) if num_free else float(not num_impossible)
    return ChiSquared(statistic, num_free, p_value, num_impossible)


def merge(counts: Counts, expected: Floats) -> tuple[Floats, Floats]:
    """Observed and expected counts of cells, each of which is expected at least LEAST_EXPECTED times.

    Rare outcomes are merged with those that begin alike, first all that differ in their last token only, and so on: a
    cell is an outcome, or "begins so, and is none of the others". What is left in the end joins the smallest cell.
    """
    cells: list[Floats] = []  # [2, number of cells]
    rest: Floats = np.stack((counts, expected)).astype(np.float64)
    while True:
        common = rest[1] >= LEAST_EXPECTED
        cells.append(rest[:, common])
        rest = np.where(common, 0.0, rest)
        if rest.ndim == 1:
            break
        rest = rest.sum(-1)
    merged = np.concatenate(cells, axis=1)
    assert merged.size, "a group has at least LEAST_EXPECTED samples"
    merged[:, merged[1].argmin()] += rest
    return merged[0], merged[1]
