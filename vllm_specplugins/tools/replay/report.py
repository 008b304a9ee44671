"""What a replay found: a table for the terminal, JSON, and a picture of speed by K."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.figures import Row, advice, best_rows

COLUMNS = ("K", "tokens/step", "drafted", "accepted", "draft, us", "ms/token", "speed-up")
LEGEND = """\
K: the fastest of those tried. tokens/step: mean tokens of a request's step, its first token left out (acceptance
length). drafted: share of steps with a draft. accepted: share of draft tokens that were right. draft: time of drafting
for a request and step. ms/token: time of the engine for a token of any request. gated: a gate drafts only what pays."""


@dataclass(frozen=True, slots=True)
class Report:
    """All of a replay: rows for each candidate and batch size, and what it was run with."""

    rows: list[Row]
    candidates: list[Candidate]
    conditions: Mapping[str, Any]


def show(report: Report, console: Console) -> None:
    """Prints the best K of each method, and what follows."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for batch in dict.fromkeys(row.batch for row in report.rows):
        table.add_section()
        table.add_row(f"[bold]{batch} at a time[/bold]")
        for row in best_rows([row for row in report.rows if row.batch == batch]):
            table.add_row(f"  {row.method}{'' if row.policy == ALWAYS else ', ' + row.policy}", *_figures(row))
    # A terminal that is narrower breaks the lines, and nothing is lost.
    wide = Console(file=console.file, width=max(console.width, Console(width=1000).measure(table).maximum))
    wide.print(table)
    for line in (LEGEND, *notes(report)):
        wide.print(line, highlight=False, soft_wrap=True)
    wide.print(f"\n{advice(report.rows, report.candidates)}", highlight=False, soft_wrap=True, markup=False)


def _figures(row: Row) -> list[str]:
    figures = [f"{row.tokens_per_step:.2f}", f"{row.coverage:.0%}"]
    figures += ["" if row.accepted is None else f"{row.accepted:.0%}", f"{row.draft_us:.1f}"]
    if row.method == NONE:
        figures = ["1.00", "", "", ""]
    return [f"{row.num_draft}" if row.num_draft else "", *figures, f"{row.ms_per_token:.2f}", f"{row.speed_up:.2f}x"]


def notes(report: Report) -> list[str]:
    """What the figures were made with, and what not to believe."""
    done = report.conditions
    words = [
        f"{done['requests']} requests with {done['output_tokens']} tokens of output behind {done['prompt_tokens']} of "
        f"prompts. A step's cost: {done['costs']}."
    ]
    faulty = dict.fromkeys(row.method for row in report.rows if row.num_faults)
    words += [f"{method} failed now and then, which cost it drafts; `check` says at what." for method in faulty]
    return words


def write(report: Report, path: Path) -> None:
    """Writes the report as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    facts = {
        **report.conditions,
        "version": version("vllm-specplugins"),
        "rows": [asdict(row) for row in report.rows],
        "candidates": [asdict(candidate) for candidate in report.candidates],
        "advice": advice(report.rows, report.candidates),
    }
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json must be a file that can be written, not {path} ({error.strerror}).") from error


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A PNG: speed by K, a line for each method and policy, a panel for each batch size.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row.batch for row in rows))
    figure = Figure(figsize=(1 + 4 * len(batches), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        own = [row for row in rows if row.batch == batch and row.method != NONE]
        for method, policy in dict.fromkeys((row.method, row.policy) for row in own):
            line = [row for row in own if (row.method, row.policy) == (method, policy)]
            style = {"marker": "o", "ls": "--" if policy == ALWAYS else "-", "label": f"{method}, {policy}"}
            axes.plot([row.num_draft for row in line], [row.speed_up for row in line], **style)
        axes.axhline(1, color="0.4", lw=1, ls=":")
        axes.set(title=f"{batch} at a time", xlabel="K, draft tokens of a step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("speed, of no speculation")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot must be a PNG file that can be written, not {path} ({error}).") from error
