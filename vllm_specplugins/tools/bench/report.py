"""What a benchmark found: a table for the terminal, and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.measure.serving import Machine
from vllm_specplugins.tools.bench.advice import advice, notes
from vllm_specplugins.tools.bench.figures import Row
from vllm_specplugins.tools.bench.methods import NONE, Config

COLUMNS = (
    "tokens/s", "ratio", "decoding alone", "tokens/step", "step cost", "drafted", "first, ms", "gap, ms", "repeats",
    "same",
)  # fmt: skip
LEGEND = """\
tokens/s: prompts included, median. ratio: to no speculation in the same round, median (range). decoding alone: without
the time to a request's first token; it is tokens/step (mean tokens of a request's step) by step cost (its time, in that
of a step without speculation). drafted: share of steps with a draft. first: to the first token, median. gap: between
the tokens of a step and the next ones of the request, median / 99th percentile. repeats: share of the output's tokens
that end 8 which stood before in it. same: outputs that are those of no speculation, token for token."""


@dataclass(frozen=True, slots=True)
class Report:
    """All of a benchmark.

    Args:
        rows: by cell, and in it by method.
        configs: of the methods.
        machine: that the engines ran on.
        conditions: what it was run with.
    """

    rows: list[Row]
    configs: Mapping[str, Config | None]
    machine: Machine
    conditions: dict[str, Any]

    @property
    def is_lossless(self) -> bool:
        """Whether no output differs that must not."""
        return self.machine.dtype != "float32" or not any(row.num_different for row in self.rows)


def show(report: Report, console: Console) -> None:
    """Prints the table, what to know about it, and what follows."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for cell in dict.fromkeys(row.cell for row in report.rows):
        table.add_section()
        table.add_row(f"[bold]{cell}[/bold]")
        for row in report.rows:
            if row.cell == cell:
                table.add_row(f"  {row.method}", *_figures(row))
    needed = Console(width=1000).measure(table).maximum
    # A terminal that is narrower breaks the lines, and nothing is lost.
    wide = Console(file=console.file, width=max(console.width, needed))
    wide.print(table)
    for line in (LEGEND, *notes(report.rows, report.machine.dtype), _conditions(report)):
        wide.print(line, highlight=False, soft_wrap=True)
    for name, config in report.configs.items():
        if config:
            wide.print(f"{name}: {json.dumps(config)}", highlight=False, soft_wrap=True)
    if report.is_lossless:
        wide.print(f"\n{advice(report.rows, report.configs)}", highlight=False, soft_wrap=True)
    else:
        wide.print("\nSpeculation changed an output, which it must not in float32.", style="bold red")


def _figures(row: Row) -> list[str]:
    plain = row.method == NONE
    same = "" if row.num_different is None else f"{row.num_outputs - row.num_different}/{row.num_outputs}"
    return [
        f"{row.tokens_per_second:.1f}",
        "1.00x" if plain else str(row.ratio),
        "1.00x" if plain else str(row.decoding),
        f"{row.tokens_per_step:.2f}",
        f"{row.step_cost.median:.2f}",
        "" if plain else f"{row.coverage:.0%}",
        f"{row.first_ms:.0f}",
        f"{row.gap_ms[0]:.1f} / {row.gap_ms[1]:.1f}",
        f"{row.repeats:.0%}{' loops' if row.loops else ''}",
        "not compared" if row.num_different is None else f"[bold red]{same}[/bold red]" if row.num_different else same,
    ]


def _conditions(report: Report) -> str:
    machine, done = report.machine, report.conditions
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "vllm-specplugins"))
    return (
        f"{done['model']}; {done['rounds']} rounds in which the engines took turns, each of {done['prompts']} requests "
        f"or more, with up to {done['tokens']} tokens; {machine.device}; {machine.dtype}; Model Runner "
        f"{machine.runner}; {versions}."
    )


def write(report: Report, path: Path) -> None:
    """Writes the report as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    versions = {name: version(name) for name in ("vllm", "torch", "transformers", "vllm-specplugins")}
    facts = {
        **report.conditions,
        "machine": asdict(report.machine),
        "versions": versions,
        "methods": dict(report.configs),
        "lossless": report.is_lossless,
        "rows": [asdict(row) | {"loops": row.loops, "beats_its_steps": row.beats_its_steps} for row in report.rows],
        "notes": list(notes(report.rows, report.machine.dtype)),
        "advice": advice(report.rows, report.configs),
    }
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json must be a file that can be written, not {path} ({error.strerror}).") from error
