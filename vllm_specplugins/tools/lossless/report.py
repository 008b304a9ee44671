"""Reports the verdict of a verification, as a table and as JSON. It uses counts and probabilities of outcomes: arrays
[V] * t (V: vocab_size, t: tokens of an outcome), one for each group of samples from one distribution."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplugins.tools.report import say, show_table, versions

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_EXPECTED = 5.0  # below this count the chi-squared distribution is a poor approximation
FALSE_ALARMS = 1e-3  # share of runs that report a lossless method as lossy
COLUMNS = ("drafted", "accepted", "chi-squared", "free", "p", "verdict")
PASSED, REFUSED, UNPROVEN, WRONG, DIED = "passed", "refused", "nothing drafted", "WRONG", "DIED"
STYLES = {PASSED: "none", REFUSED: "yellow", UNPROVEN: "red", WRONG: "bold red", DIED: "bold red"}
LEGEND = (
    "chi-squared: the statistic of the first tokens' counts and exact probabilities; it merges rare outcomes. free: "
    "its degrees of freedom. At temperature 0, outputs must equal those without speculation. p: the probability of "
    "such a deviation without an error. The verdict applies Bonferroni's correction to all rows: without an error, at "
    f"most one run in {1 / FALSE_ALARMS:,.0f} reports {WRONG}."
)


@dataclass(frozen=True, slots=True)
class ChiSquared:
    statistic: float  # sum of (observed - expected)^2 / expected; infinite if an impossible outcome was observed
    num_free: int  # degrees of freedom; 0 if everything is certain
    p_value: float  # probability of a statistic of this size or more, if the probabilities are correct
    num_impossible: int = 0  # observations of impossible outcomes


def chi_squared(groups: Sequence[tuple[Counts, Floats, Floats]]) -> ChiSquared:
    """Tests all groups together: counts, probabilities, and probabilities that are 0 only for impossible outcomes.

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
    half_free, half = (torch.tensor(x / 2, dtype=torch.float64) for x in (num_free, statistic))
    p_value = float(torch.special.gammaincc(half_free, half)) if num_free else float(not num_impossible)
    return ChiSquared(statistic, num_free, p_value, num_impossible)


def merge(counts: Counts, expected: Floats) -> tuple[Floats, Floats]:
    """Returns observed and expected counts of cells, each with an expected count of at least LEAST_EXPECTED. Rare
    outcomes are merged with outcomes that have the same beginning: first with those that differ only in the last token,
    and so on. The rest joins the smallest cell."""
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


@dataclass(frozen=True, slots=True)
class Judged:
    method: str
    cell: str
    num_drafted: int = 0
    num_accepted: int = 0
    test: ChiSquared | None = None  # of a sampled cell
    num_different: int | None = None  # outputs at temperature 0 that differ from those without speculation
    refusal: str | None = None  # vLLM's sentence
    failure: str | None = None  # why the engine ended, in a sentence


class Report:
    """All judged cells and their verdicts, by method, with no speculation first."""

    def __init__(self, judged: list[Judged], conditions: dict[str, Any]):
        self.judged, self.conditions = judged, conditions
        limit = FALSE_ALARMS / max(1, sum(cell.test is not None for cell in judged))
        self.verdicts = [_verdict(cell, limit, must_draft=cell.method != judged[0].method) for cell in judged]

    @property
    def is_lossless(self) -> bool:
        """Returns whether all cells that vLLM serves passed, and each method has at least one cell."""
        passed = {cell.method for cell, verdict in self.pairs if verdict == PASSED}
        return passed == {cell.method for cell in self.judged} and set(self.verdicts) <= {PASSED, REFUSED}

    @property
    def pairs(self) -> list[tuple[Judged, str]]:
        return list(zip(self.judged, self.verdicts, strict=True))

    @property
    def conclusion(self) -> str:
        counts = [f"{count} {verdict}" for verdict in STYLES if (count := self.verdicts.count(verdict))]
        plain = self.judged[0].method
        if any(verdict == WRONG and cell.method == plain for cell, verdict in self.pairs):
            return f"Nothing is proven: this vLLM is wrong with {plain} ({', '.join(counts)})."
        return f"{'Lossless' if self.is_lossless else 'NOT proven lossless'}: {', '.join(counts)}."

    @property
    def facts(self) -> dict[str, Any]:
        cells = [asdict(cell) | {"verdict": verdict} for cell, verdict in self.pairs]
        packages = versions("vllm", "torch", "transformers")
        return {"lossless": self.is_lossless, **self.conditions, "versions": packages, "cells": cells}

    def show(self) -> None:
        methods = dict.fromkeys(cell.method for cell in self.judged)
        rows = {name: [_row(*pair) for pair in self.pairs if pair[0].method == name] for name in methods}
        show_table(COLUMNS, rows, "sampling parameters")
        refused = dict.fromkeys(f"{REFUSED}: {cell.refusal}" for cell in self.judged if cell.refusal)
        died = [f"{DIED}: {cell.failure}" for cell in self.judged if cell.failure]
        for sentence in (LEGEND, *refused, *died, f"\n{self.conclusion}"):
            say(sentence)


def _verdict(cell: Judged, limit: float, must_draft: bool) -> str:
    if cell.refusal or cell.failure:
        return REFUSED if cell.refusal else DIED
    if cell.num_different or (cell.test is not None and cell.test.p_value < limit):
        return WRONG
    return UNPROVEN if must_draft and not cell.num_drafted else PASSED


def _row(cell: Judged, verdict: str) -> Sequence[str]:
    figures: Sequence[str] = [""] * 5
    drafts = f"{cell.num_drafted:,}", f"{cell.num_accepted:,}"
    if cell.test is not None:
        figures = *drafts, f"{cell.test.statistic:.1f}", str(cell.test.num_free), f"{cell.test.p_value:.2g}"
    elif cell.num_different is not None:
        figures = *drafts, "same" if not cell.num_different else f"{cell.num_different} differ", "", ""
    return [cell.cell, *figures, f"[{STYLES[verdict]}]{verdict}[/]"]
