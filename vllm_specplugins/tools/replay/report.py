"""What a replay found: a table for the terminal, JSON, and points of speed by K for a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.figures import Row, advice, best_rows, choose, range_of
from vllm_specplugins.tools.report import Point, say, show_table, table_of, versions

COLUMNS = ("K", "tok/step", "drafted", "accepted", "draft, us", "ms/token", "predicted")
LEGEND = (
    "K: the fastest of those tried. tok/step: mean tokens of a request's step, its first token left out (acceptance "
    "length). drafted: share of steps with a draft. accepted: share of draft tokens that were right. draft: time of "
    "drafting for a request and step, where the device waits for it. ms/token: time of the engine for a token of any "
    "request. predicted: the speed-up over no speculation, and its range (90 %) over requests like these. gated: a "
    "gate drafts only what pays."
)
FEW_REQUESTS = 200  # the range of fewer says little


@dataclass(frozen=True, slots=True)
class Report:
    """All of a replay: rows for each candidate and batch size, and what it was run with."""

    rows: list[Row]
    candidates: list[Candidate]
    conditions: Mapping[str, Any]


def show(report: Report, console: Console) -> None:
    """Prints the best K of each method, and what follows."""
    table = table_of("", COLUMNS)
    for batch in dict.fromkeys(row.batch for row in report.rows):
        table.add_section()
        table.add_row(f"[bold]{batch} at a time[/bold]")
        for row in best_rows([row for row in report.rows if row.batch == batch]):
            table.add_row(f"  {row.method}{'' if row.policy == ALWAYS else ', ' + row.policy}", *_figures(row))
    show_table(console, table)
    for words in (LEGEND, *notes(report), f"\n{advice(report.rows, report.candidates)}"):
        say(console, words)


def _figures(row: Row) -> list[str]:
    figures = [f"{row.tokens_per_step:.2f}", f"{row.coverage:.0%}"]
    figures += ["" if row.accepted is None else f"{row.accepted:.0%}", f"{row.draft_us:.1f}"]
    if row.method == NONE:
        figures = ["1.00", "", "", ""]
    speed = "1.00x" if row.method == NONE else range_of(row)
    return [f"{row.num_draft}" if row.num_draft else "", *figures, f"{row.ms_per_token:.2f}", speed]


def notes(report: Report) -> list[str]:
    """What the figures were made with, and what not to believe."""
    done = report.conditions
    host = f"; {done['host']}" if done["host"] else ""
    words = [
        f"{done['requests']} requests with {done['output_tokens']} tokens of output behind {done['prompt_tokens']} of "
        f"prompts. A step's cost: {done['costs']}{host}."
    ]
    if done["requests"] < FEW_REQUESTS:
        words.append(f"{done['requests']} requests say little of others: play {FEW_REQUESTS} or more.")
    best, _ = choose(report.rows, report.candidates)
    if best is not None and best.num_draft == done["most"]:
        words.append("The largest K tried is the best: try larger ones, or leave --num-draft out.")
    faulty = dict.fromkeys(row.method for row in report.rows if row.num_faults)
    words += [f"{method} failed now and then, which cost it drafts; `check` says at what." for method in faulty]
    return words


def facts(report: Report) -> dict[str, Any]:
    """The report as JSON takes it."""
    return {
        **report.conditions,
        "versions": versions(),
        "rows": [asdict(row) for row in report.rows],
        "candidates": [asdict(candidate) for candidate in report.candidates],
        "notes": notes(report),
        "advice": advice(report.rows, report.candidates),
    }


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[Point]]]:
    """The speed by K: by batch size, method and policy."""
    drawn: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        if row.method != NONE:
            points = drawn.setdefault(f"{row.batch} at a time", {}).setdefault(f"{row.method}, {row.policy}", [])
            points.append((f"K {row.num_draft}", row.speed_up, row.low, row.high))
    return drawn
