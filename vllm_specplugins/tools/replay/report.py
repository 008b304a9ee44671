"""What a replay found: a table for the terminal, JSON, and a picture of speed by K."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.figures import Row, advice, best_rows, choose, range_of
from vllm_specplugins.tools.report import save_picture, say, show_table, table_of, versions

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


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A PNG: speed by K, a line for each method and policy, a panel for each batch size.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row.batch for row in rows))
    figure = Figure(figsize=(1.5 + 4 * len(batches), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        own = [row for row in rows if row.batch == batch and row.method != NONE]
        colors = {method: f"C{number}" for number, method in enumerate(dict.fromkeys(row.method for row in own))}
        for method, policy in dict.fromkeys((row.method, row.policy) for row in own):
            line = [row for row in own if (row.method, row.policy) == (method, policy)]
            sizes, style = [row.num_draft for row in line], "--" if policy == ALWAYS else "-"
            label = f"{method}, {policy}"
            axes.plot(sizes, [row.speed_up for row in line], style, marker="o", color=colors[method], label=label)
            axes.fill_between(
                sizes, [row.low for row in line], [row.high for row in line], color=colors[method], alpha=0.1
            )
        axes.axhline(1, color="0.4", lw=1, ls=":")
        axes.set(title=f"{batch} at a time", xlabel="K, draft tokens of a step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("predicted speed-up over no speculation")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    save_picture(figure, path)
