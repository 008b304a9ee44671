"""The number of tokens that a drafter drafts in addition to a lookup on Model Runner V2, computed by hand."""

import numpy as np
import pytest

from vllm_specplugins.gate.budget import StepBudget
from vllm_specplugins.gate.drafter_length import CONTINUED
from vllm_specplugins.gate.trials import EXPLORE_EVERY

LENGTHS, STEP_MS = range(1, 6), 10.0


def chosen(reports: list[tuple[float, float]], pass_ms: float, lengths: range | tuple[int, ...] = LENGTHS) -> int:
    return StepBudget(1, 1).drafter_length(np.array(reports), lengths, STEP_MS, pass_ms * (len(lengths) - 1))


def best(reports: list[tuple[float, float]], pass_ms: float) -> int:
    """The same in plain sums: a draft of one token counts as none."""
    tokens = [len(reports) + sum(gain for gain, _ in reports)]
    for length in LENGTHS[1:]:
        worth = [(gain, sum(p**n for n in range(1, length + 1)) + CONTINUED * p**length) for gain, p in reports]
        tokens.append(len(reports) + sum(map(max, worth)))
    return 1 + int(np.argmax([number / (STEP_MS + pass_ms * length) for length, number in enumerate(tokens)]))


@pytest.mark.parametrize("pass_ms", [0.01, 0.2, 0.4, 0.8])
def test_by_hand(pass_ms: float) -> None:
    """Of copying requests, of those with a good or a poor drafter, and of both. Fails if a request's reports count for
    another, if passes are not charged, or if the lookup's gain does not count beside the drafter's."""
    copies, good, poor = (20.0, 0.9), (0.3, 0.85), (0.3, 0.4)
    batches = [[copies], [good], [poor], [copies, good], [copies, poor], [good, poor, copies]]
    found = [chosen(reports, pass_ms) for reports in batches]
    assert found == [best(reports, pass_ms) for reports in batches]
    assert found[0] == 1 and (found[1] == 5) == (pass_ms < 0.8)


def test_trials() -> None:
    """Fails if a drafter that does not pay is never asked again, or too often."""
    rule, copies = StepBudget(1, 1), np.array([(20.0, 0.5)])
    lengths = [rule.drafter_length(copies, LENGTHS, 10.0, 0.4) for _ in range(100)]
    assert set(lengths) == {1, 5} and 100 // (EXPLORE_EVERY + 2) <= lengths.count(5) <= 100 // EXPLORE_EVERY
    rule = StepBudget(1, 1)
    assert [rule.drafter_length(copies, LENGTHS, 10.0, 4.0) for _ in range(39)] == [1] * 39


def test_a_block_drafts_all_or_nothing() -> None:
    """Fails if a drafter of whole blocks is asked while all copy, or is not where it gains."""
    assert chosen([(20.0, 0.9)], 0.5, (0, 5)) == 0 and chosen([(0.3, 0.9)], 0.5, (0, 5)) == 5
