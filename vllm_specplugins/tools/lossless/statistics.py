"""Counts of outcomes against their probabilities: chi-squared with rare outcomes merged, and many such tests at once.

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
    statistic, num_free = 0.0, 0
    for counts, probs, _ in groups:
        observed, expected = merge(counts, probs * counts.sum())
        statistic += float(((observed - expected) ** 2 / expected).sum())
        num_free += len(observed) - 1
    if num_impossible:
        return ChiSquared(float("inf"), num_free, 0.0, num_impossible)
    return ChiSquared(statistic, num_free, survival(statistic, num_free))


def merge(counts: Counts, expected: Floats) -> tuple[Floats, Floats]:
    """Observed and expected counts of cells, each of which is expected at least LEAST_EXPECTED times.

    Rare outcomes are merged with those that begin alike, first all that differ in their last token only, and so on: a
    cell is an outcome, or "begins so, and is none of the others". What is left in the end joins the smallest cell.
    """
    cells: list[tuple[Floats, Floats]] = []
    observed = counts.astype(np.float64)
    while True:
        common = expected >= LEAST_EXPECTED
        cells.append((observed[common], expected[common]))
        observed, expected = np.where(common, 0, observed), np.where(common, 0, expected)
        if not observed.ndim:
            break
        observed, expected = observed.sum(-1), expected.sum(-1)
    merged_observed, merged_expected = (np.concatenate([cell[i].ravel() for cell in cells]) for i in (0, 1))
    assert len(merged_expected), "a group has at least LEAST_EXPECTED samples"
    smallest = int(merged_expected.argmin())
    merged_observed[smallest] += observed
    merged_expected[smallest] += expected
    return merged_observed, merged_expected


def survival(statistic: float, num_free: int) -> float:
    """How probable it is that a chi-squared variable with so many degrees of freedom exceeds the statistic.

    >>> round(survival(3.841, 1), 4)
    0.05
    """
    if num_free == 0:
        return 1.0
    half_free, half = (torch.tensor(x / 2, dtype=torch.float64) for x in (num_free, statistic))
    return float(torch.special.gammaincc(half_free, half))


def holm(p_values: Sequence[float], false_alarms: float) -> list[bool]:
    """Which of many tests reject (Holm, 1979): a false one occurs in at most the given share of runs.

    >>> holm([0.04, 0.001, 0.02], 0.05)
    [True, True, True]
    >>> holm([0.04, 0.03, 0.001], 0.05)
    [False, False, True]
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > false_alarms / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
