"""What a benchmark found: a table for the terminal, JSON and a picture."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplugins.engine.harness.traffic import Machine
from vllm_specplugins.tools.bench.advice import notes, verdict
from vllm_specplugins.tools.bench.figures import Row
from vllm_specplugins.tools.picker import NONE, Config
from vllm_specplugins.tools.report import publish, say, show_table, stdout, table_of, versions

COLUMNS = ("tokens/s", "ratio", "decoding alone", "tok/step", "step cost", "same")
AT_RATES = ("tokens/s", "ratio", "tok/step", "first, ms", "next, ms", "same")
LEGEND = (
    "tokens/s: prompts included, median. ratio: to no speculation in the same round, median (range). decoding alone: "
    "without the time to a request's first token; it is tok/step (mean tokens of a request's step) by step cost (its "
    "time, in that of a step without speculation). same: outputs that are those of no speculation, token for token."
)
RATES_LEGEND = (
    "tokens/s: prompts included, median; at a rate those of the arrivals, and the advice is that of the batches. "
    "ratio: to no speculation in the same round (range). tok/step: mean tokens of a request's step. first: from "
    "a request's arrival to its first token, median. next: from its tokens to the next ones, median and 99th "
    "percentile. same: outputs that are those of no speculation, or of the log, token for token."
)
FRESH = (
    "Each round asks prompts of its own, as a tenant of its own, without a prefix cache: nothing is drafted from what "
    "earlier rounds emitted. What an engine learns of itself (times of its steps, how often drafts are accepted) is "
    "kept, as in a server that has been up for a minute."
)


@dataclass(frozen=True, slots=True)
class Report:
    """All of a benchmark.

    Args:
        rows: by cell, and in it by method.
        configs: of the methods, no speculation first.
        machine: that the engines ran on.
        conditions: what it was run with.
        step_ms_by_tokens: of all engines: ms of a step by the tokens that it verified. `replay --costs` reads them.
    """

    rows: list[Row]
    configs: Mapping[str, Config | None]
    machine: Machine
    conditions: dict[str, Any]
    step_ms_by_tokens: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_rates(self) -> bool:
        """Whether requests arrive at a rate somewhere."""
        return any(row.cell.rate for row in self.rows)

    @property
    def is_lossless(self) -> bool:
        """Whether no output differs that must not."""
        may_differ = self.machine.dtype != "float32" and not self.conditions["forced"]
        return may_differ or not any(row.num_different for row in self.rows)

    def verdict(self) -> tuple[str, Config | None]:
        """What to serve with, in words, and its configuration if there is advice."""
        if not self.is_lossless:
            if self.conditions["forced"]:
                return "An output differs from the log that the engines were forced to emit.", None
            return "Speculation changed an output, which it must not in float32.", None
        return verdict([row for row in self.rows if not row.cell.rate], self.configs)

    def notes(self) -> Iterator[str]:
        """What to know before believing the figures."""
        yield FRESH
        if names := self.conditions["keeps"]:
            yield f"But in {', '.join(names)}: what was learnt from a round's outputs is known in the next."
        if names := self.conditions["short"]:
            yield f"{', '.join(names)} has fewer prompts than were asked for: rounds share them."
        yield from notes(self.rows, self.machine.dtype)


def tell(args: argparse.Namespace, report: Report, more: Mapping[str, Any] | None = None) -> int:
    """Prints and writes what was found, and in the file `more`; the exit status."""
    _show(report, stdout())
    advice, chosen = report.verdict()
    facts = {
        **report.conditions,
        "machine": asdict(report.machine),
        "versions": versions("vllm", "torch", "transformers"),
        "methods": dict(report.configs),
        "step_ms_by_tokens": dict(report.step_ms_by_tokens),
        "lossless": report.is_lossless,
        "rows": [asdict(row) | {"loops": row.loops, "beats_its_steps": row.beats_its_steps} for row in report.rows],
        "notes": list(report.notes()),
        "advice": advice,
        "chosen": chosen,
        **(more or {}),
    }
    machine = report.machine
    title = f"{Path(args.model).name}, {machine.dtype}, {machine.device}\n{advice.splitlines()[0]}"
    points = [
        (f"temperature {row.cell.temperature:g}", row.method, f"{row.cell.workload}\n{row.cell.batch} at a time",
         row.ratio.median, row.ratio.low, row.ratio.high)
        for row in report.rows if row.method != NONE
    ]  # fmt: skip
    publish(args, facts, title, points)
    return 0 if report.is_lossless else 1


def _show(report: Report, console: Console) -> None:
    """Prints the table, what to know about it, and what follows."""
    columns = AT_RATES if report.has_rates else COLUMNS
    table = table_of("", columns)
    for cell in dict.fromkeys(row.cell for row in report.rows):
        table.add_section()
        table.add_row(f"[bold]{cell}[/bold]")
        for row in report.rows:
            if row.cell == cell:
                figures = _figures(row)
                table.add_row(f"  {row.method}", *(figures[column] for column in columns))
    show_table(console, table)
    for words in (RATES_LEGEND if report.has_rates else LEGEND, *report.notes(), _conditions(report)):
        say(console, words)
    for name, config in report.configs.items():
        if config:
            say(console, f"{name}: {json.dumps(config)}")
    say(console, f"\n{report.verdict()[0]}", style=None if report.is_lossless else "bold red")


def _figures(row: Row) -> dict[str, str]:
    """All columns."""
    same = "sampled" if row.num_different is None else f"{row.num_outputs - row.num_different}/{row.num_outputs}"
    median_ms, p99_ms = row.gap_ms
    return {
        "tokens/s": f"{row.tokens_per_second:.1f}",
        "ratio": "1.00x" if row.method == NONE else str(row.ratio),
        "decoding alone": "1.00x" if row.method == NONE else str(row.decoding),
        "tok/step": f"{row.tokens_per_step:.2f}",
        "step cost": f"{row.step_cost.median:.2f}",
        "first, ms": f"{row.first_ms:.0f}",
        "next, ms": f"{median_ms:.0f}, {p99_ms:.0f}",
        "same": f"[bold red]{same}[/bold red]" if row.num_different else same,
    }


def _conditions(report: Report) -> str:
    machine, done = report.machine, report.conditions
    made = ", ".join(f"{name} {number}" for name, number in versions("vllm", "torch").items())
    turns = " in which the engines took turns" if done["together"] else ", one engine after the other"
    return (
        f"{done['model']}; {done['rounds']} rounds{turns}, each of {done['prompts']} requests "
        f"or more, with up to {done['tokens']} tokens; {machine.device}; {machine.dtype}; Model Runner "
        f"{machine.runner}; {made}."
    )
