"""What a benchmark found: a table for the terminal, and JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from vllm_specplugins.engine.harness.serving import Machine
from vllm_specplugins.tools.bench.advice import advice, chosen, notes
from vllm_specplugins.tools.bench.figures import Row
from vllm_specplugins.tools.picker import NONE, Config
from vllm_specplugins.tools.report import say, show_table, table_of, versions

COLUMNS = ("tokens/s", "ratio", "decoding alone", "tok/step", "step cost", "same")
MORE_COLUMNS = ("drafted", "first, ms", "gap, ms", "repeats")  # with --wide
LEGEND = (
    "tokens/s: prompts included, median. ratio: to no speculation in the same round, median (range). decoding alone: "
    "without the time to a request's first token; it is tok/step (mean tokens of a request's step) by step cost (its "
    "time, in that of a step without speculation). same: outputs that are those of no speculation, token for token."
)
MORE_LEGEND = (
    "drafted: share of steps with a draft. first: to the first token, median. gap: between the tokens of a step and "
    "the next ones of the request, median / 99th percentile. repeats: share of the output's tokens that end 8 which "
    "stood before in it."
)
FRESH = (
    "Each round asks prompts of its own, as a tenant of its own, without a prefix cache: nothing is drafted from what "
    "earlier rounds said. What an engine learns of itself (the times of its steps, how often drafts are accepted) is "
    "kept, as in a server that has been up for a minute."
)


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

    def notes(self) -> Iterator[str]:
        """What to know before believing the figures."""
        yield FRESH
        if names := self.conditions.get("keeps"):
            yield f"But in {', '.join(names)}: what was learnt from a round's outputs is known in the next."
        if names := self.conditions.get("short"):
            yield f"{', '.join(names)} has fewer prompts than were asked for: rounds share them."
        yield from notes(self.rows, self.machine.dtype)


def show(report: Report, console: Console, wide: bool = False) -> None:
    """Prints the table, what to know about it, and what follows."""
    table = table_of("", COLUMNS + (MORE_COLUMNS if wide else ()))
    for cell in dict.fromkeys(row.cell for row in report.rows):
        table.add_section()
        table.add_row(f"[bold]{cell}[/bold]")
        for row in report.rows:
            if row.cell == cell:
                table.add_row(f"  {row.method}", *_figures(row), *(_more_figures(row) if wide else ()))
    show_table(console, table)
    for words in (LEGEND, *([MORE_LEGEND] if wide else []), *report.notes(), _conditions(report)):
        say(console, words)
    for name, config in report.configs.items():
        if config:
            say(console, f"{name}: {json.dumps(config)}")
    if report.is_lossless:
        say(console, f"\n{advice(report.rows, report.configs)}")
    else:
        say(console, "\nSpeculation changed an output, which it must not in float32.", style="bold red")


def _figures(row: Row) -> list[str]:
    plain = row.method == NONE
    same = "" if row.num_different is None else f"{row.num_outputs - row.num_different}/{row.num_outputs}"
    return [
        f"{row.tokens_per_second:.1f}",
        "1.00x" if plain else str(row.ratio),
        "1.00x" if plain else str(row.decoding),
        f"{row.tokens_per_step:.2f}",
        f"{row.step_cost.median:.2f}",
        "sampled" if row.num_different is None else f"[bold red]{same}[/bold red]" if row.num_different else same,
    ]


def _more_figures(row: Row) -> list[str]:
    return [
        "" if row.method == NONE else f"{row.coverage:.0%}",
        f"{row.first_ms:.0f}",
        f"{row.gap_ms[0]:.1f} / {row.gap_ms[1]:.1f}",
        f"{row.repeats:.0%}{' loops' if row.loops else ''}",
    ]


def _conditions(report: Report) -> str:
    machine, done = report.machine, report.conditions
    made = ", ".join(f"{name} {number}" for name, number in versions("vllm", "torch").items())
    turns = " in which the engines took turns" if done["together"] else ", one engine after the other"
    return (
        f"{done['model']}; {done['rounds']} rounds{turns}, each of {done['prompts']} requests "
        f"or more, with up to {done['tokens']} tokens; {machine.device}; {machine.dtype}; Model Runner "
        f"{machine.runner}; {made}."
    )


def facts(report: Report) -> dict[str, Any]:
    """The report as JSON takes it."""
    return {
        **report.conditions,
        "machine": asdict(report.machine),
        "versions": versions("vllm", "torch", "transformers"),
        "methods": dict(report.configs),
        "lossless": report.is_lossless,
        "rows": [asdict(row) | {"loops": row.loops, "beats_its_steps": row.beats_its_steps} for row in report.rows],
        "notes": list(report.notes()),
        "advice": advice(report.rows, report.configs),
        "chosen": chosen(report.rows, report.configs) if report.is_lossless else None,
    }
