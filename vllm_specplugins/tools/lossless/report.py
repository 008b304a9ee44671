"""What a verification found: a table for the terminal, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from vllm_specplugins.tools.lossless.statistics import ChiSquared
from vllm_specplugins.tools.report import say, show_table, table_of, versions

FALSE_ALARMS = 1e-3  # share of runs in which a lossless method is called lossy
COLUMNS = ("drafted", "accepted", "chi-squared", "free", "p", "verdict")
PASSED, REFUSED, UNPROVEN, WRONG, DIED = "passed", "refused", "nothing drafted", "WRONG", "DIED"
STYLES = {WRONG: "bold red", DIED: "bold red", UNPROVEN: "red", REFUSED: "yellow"}
LEGEND = (
    "chi-squared, free: of the counts of the first tokens against their exact probabilities, rare outcomes merged, and "
    "its degrees of freedom. Temperature 0: outputs against those without speculation, token for token. p: how "
    "probable such a deviation is if nothing is wrong. The verdict is Bonferroni's over all rows: if nothing is wrong, "
    f"at most one run in {1 / FALSE_ALARMS:,.0f} says {WRONG}."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell of a method: refused by vLLM, or the end of its engine, or compared token for token, or tested.

    Args:
        num_different: outputs at temperature 0 that differ from those without speculation.
    """

    method: str
    cell: str
    num_drafted: int = 0
    num_accepted: int = 0
    test: ChiSquared | None = None
    num_different: int | None = None
    refusal: str | None = None
    failure: str | None = None


class Report:
    """All judged cells and their verdicts; the first method is no speculation at all.

    Args:
        judged: by method.
        conditions: what it was run with.
    """

    def __init__(self, judged: list[Judged], conditions: dict[str, Any]):
        self.judged, self.conditions = judged, conditions
        limit = FALSE_ALARMS / max(1, sum(cell.test is not None for cell in judged))
        self.verdicts = [_verdict(cell, limit, must_draft=cell.method != judged[0].method) for cell in judged]

    @property
    def is_lossless(self) -> bool:
        """Whether all that vLLM serves passed, and of every method something did."""
        passed = {cell.method for cell, v in zip(self.judged, self.verdicts, strict=True) if v == PASSED}
        return passed == {cell.method for cell in self.judged} and set(self.verdicts) <= {PASSED, REFUSED}


def _verdict(cell: Judged, limit: float, must_draft: bool) -> str:
    if cell.refusal is not None:
        return REFUSED
    if cell.failure is not None:
        return DIED
    if cell.num_different or (cell.test is not None and cell.test.p_value < limit):
        return WRONG
    return UNPROVEN if must_draft and not cell.num_drafted else PASSED


def show(report: Report, console: Console) -> None:
    """Prints a table for each method, and the verdict."""
    for method in dict.fromkeys(cell.method for cell in report.judged):
        table = table_of("sampling parameters", COLUMNS, method)
        for cell, verdict in zip(report.judged, report.verdicts, strict=True):
            if cell.method == method:
                table.add_row(cell.cell, *_numbers(cell), verdict, style=STYLES.get(verdict))
        show_table(console, table)
    say(console, LEGEND)
    for sentence in dict.fromkeys(f"{REFUSED}: {cell.refusal}" for cell in report.judged if cell.refusal):
        say(console, sentence)
    for cell in report.judged:
        if cell.failure:
            say(console, f"{DIED}: {cell.failure}")
    say(console, f"\n{_conclusion(report)}")


def _numbers(cell: Judged) -> Sequence[str]:
    drafts = f"{cell.num_drafted:,}", f"{cell.num_accepted:,}"
    if cell.test is not None:
        return *drafts, f"{cell.test.statistic:.1f}", str(cell.test.num_free), f"{cell.test.p_value:.2g}"
    if cell.num_different is None:
        return [""] * 5
    return *drafts, "same" if not cell.num_different else f"{cell.num_different} differ", "", ""


def _conclusion(report: Report) -> str:
    count = {verdict: report.verdicts.count(verdict) for verdict in (PASSED, REFUSED, UNPROVEN, WRONG, DIED)}
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    plain = report.judged[0].method
    if any(v == WRONG and cell.method == plain for cell, v in zip(report.judged, report.verdicts, strict=True)):
        return f"Nothing is proven: this vLLM is wrong with {plain} ({numbers})."
    return f"{'Lossless' if report.is_lossless else 'NOT proven lossless'}: {numbers}."


def facts(report: Report) -> dict[str, Any]:
    """The report as JSON takes it."""
    cells = [asdict(cell) | {"verdict": v} for cell, v in zip(report.judged, report.verdicts, strict=True)]
    made = versions("vllm", "torch", "transformers")
    return {"lossless": report.is_lossless, **report.conditions, "versions": made, "cells": cells}
