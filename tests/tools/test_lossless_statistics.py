"""The chi-squared test by which `verify-lossless` judges."""

import numpy as np
import pytest
from scipy.stats import chisquare

from vllm_specplugins.tools.lossless.report import LEAST_EXPECTED, chi_squared, merge


def test_survival_is_scipys() -> None:
    """Kills: half of anything, the other tail."""
    for num_cells in (2, 4, 31, 301):
        counts = np.arange(num_cells) * 10 + 20
        probs = np.full(num_cells, 1 / num_cells)
        found, expected = chi_squared([(counts, probs, probs)]), chisquare(counts)
        assert (found.statistic, found.num_free) == (pytest.approx(expected.statistic), num_cells - 1)
        assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9, abs=1e-300)
    assert chi_squared([(np.array([9]), np.ones(1), np.ones(1))]).p_value == 1.0


def test_merging() -> None:
    """By hand. Kills: rare outcomes dropped, or merged with such as begin otherwise while their own would do."""
    expected = np.array([[40.0, 3.0, 4.0], [6.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
    observed, merged = merge(np.arange(9).reshape(3, 3), expected)
    # Two common outcomes; the rest of the first row (7); then the rest of all (2 + 1.5), which is rare, too.
    assert merged.tolist() == [40.0, 6.0 + 3.5, 7.0]
    assert observed.tolist() == [0.0, 3.0 + 4 + 5 + 6 + 7 + 8, 1.0 + 2]


def test_merged_cells_are_common_and_complete() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        probs = rng.dirichlet(np.full(512, 0.05)).reshape(8, 8, 8)
        counts = rng.multinomial(200, probs.ravel()).reshape(probs.shape)
        observed, expected = merge(counts, probs * 200)
        assert expected.min() >= LEAST_EXPECTED
        assert observed.sum() == 200 and expected.sum() == pytest.approx(200)


def test_groups_add_up() -> None:
    counts, probs = np.array([[30, 25], [20, 25]]), np.full((2, 2), 0.25)
    alone, both = (chi_squared([(counts, probs, probs)] * count) for count in (1, 2))
    assert both.statistic == 2 * alone.statistic and both.num_free == 2 * alone.num_free == 6


def groups(rng: np.random.Generator, shift: float, num_samples: int = 1000) -> list[tuple[np.ndarray, ...]]:
    """Counts from four distributions over pairs, whose first outcome has `shift` more probability than is said."""
    result = []
    for index in range(4):
        probs = np.random.default_rng(index).dirichlet(np.full(100, 0.3))
        true = probs * (1 - shift)
        true[0] += shift
        shape = (10, 10)
        result.append((rng.multinomial(num_samples, true).reshape(shape), probs.reshape(shape), probs.reshape(shape)))
    return result


def test_false_alarms() -> None:
    """At the stated rate: p-values of 2000 right distributions are uniform. Kills: wrong degrees of freedom."""
    rng = np.random.default_rng(1)
    p_values = np.array([chi_squared(groups(rng, 0.0, 200)).p_value for _ in range(2000)])
    for level in (0.01, 0.05, 0.5):
        share, deviation = (p_values < level).mean(), (level * (1 - level) / len(p_values)) ** 0.5
        assert abs(share - level) < 4 * deviation


def test_a_planted_difference_is_found() -> None:
    rng = np.random.default_rng(2)
    assert all(chi_squared(groups(rng, 0.05)).p_value < 1e-6 for _ in range(20))


def test_the_impossible_is_no_accident() -> None:
    """One sample of a thousand is enough, unless rounding may explain it."""
    counts, probs = np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0])
    test = chi_squared([(counts, probs, probs)])
    assert test.p_value == 0 and test.num_impossible == 1
    forgiving = chi_squared([(counts, probs, np.array([0.5, 0.4, 0.1]))])
    assert forgiving.p_value > 0.5 and forgiving.num_impossible == 0
