"""Writes the report of a benchmark: a table and JSON, the recommended method, and reasons for doubt."""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_specplugins.engine.harness.traffic import Machine
from vllm_specplugins.tools.bench.figures import Row, Spread
from vllm_specplugins.tools.picker import NONE, Config
from vllm_specplugins.tools.report import say, serve_with, show_table, versions, write_json

PAYS = 1.03  # smallest gain for a recommendation
LOSES = 0.97
MIN_ROUNDS, MIN_REQUESTS = 3, 8  # of a workload: fewer prove too little
COLUMNS = ("tokens/s", "ratio", "decoding alone", "tok/step", "step cost", "same")
AT_RATES = ("tokens/s", "ratio", "tok/step", "first, ms", "next, ms", "same")
LEGEND = (
    "ratio: speed relative to no speculation in the same round, median (range). tokens/s: the median of no speculation "
    "times the ratio, prompts included. tok/step: mean tokens of a request's step. same: outputs that equal those of "
    "no speculation, or of the log, token for token. "
)
DECODING_LEGEND = (
    "decoding alone: the speed without the time to the first token, which is tok/step divided by step cost. step cost: "
    "time of a step, relative to a step without speculation."
)
RATES_LEGEND = (
    "first: median time from a request's arrival to its first token. next: time between its tokens, median and 99th "
    "percentile. In rows with a rate, tokens/s is the rate of arrivals; the advice comes from the other rows."
)
FRESH = (
    "Each round sends new prompts as a new tenant, without a prefix cache, so no method of ours drafts from outputs of "
    "earlier rounds. Engines keep their estimates of step times and acceptance, as a server does."
)


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[Row]  # in order of cell, then method
    configs: Mapping[str, Config | None]  # by method, no speculation first
    machine: Machine
    conditions: dict[str, Any]  # arguments of the run
    step_ms_by_tokens: Mapping[int, float] = field(default_factory=dict)  # of all engines, for `replay --costs`

    @property
    def is_lossless(self) -> bool:
        may_differ = self.machine.dtype != "float32" and not self.conditions["forced"]
        return may_differ or not any(row.num_different for row in self.rows)

    def verdict(self) -> tuple[str, Config | None]:
        """Returns advice in words, and the configuration of the best method; None for no speculation, or if the result
        is uncertain. A method is recommended if the 95 % interval of its ratio to no speculation, over rounds in which
        both serve the same prompts, is above 1, and its median pays off."""
        if not self.is_lossless and self.conditions["forced"]:
            return "An output differs from the log that the engines were forced to emit.", None
        if not self.is_lossless:
            return "Error: speculation changed an output in float32.", None
        rows = [row for row in self.rows if not row.cell.rate]
        by_method = {name: [row for row in rows if row.method == name] for name in self.configs}
        gains = {name: mean_ratio(its) for name, its in by_method.items()}
        best = max(list(gains)[1:], key=lambda name: gains[name].median)
        words, gain = f"{best}: {gains[best]}", gains[best]
        if len(cells := by_method[best]) > 1:
            low, high = (end(cells, key=lambda row: row.ratio.median) for end in (min, max))
            words += f" in the mean, {low.ratio.median:.2f}x ({low.cell}) to {high.ratio.median:.2f}x ({high.cell})"
            if low.ratio.median < LOSES:
                words += f"; serve such traffic ({low.cell}) without speculation"
        num_rounds, num_requests = len(gain.rounds), min(row.num_outputs for row in rows)
        doubts = [f"it needs {MIN_ROUNDS} rounds, not {num_rounds}"] * (num_rounds < MIN_ROUNDS)
        if num_requests < MIN_REQUESTS:
            doubts.append(f"it needs {MIN_REQUESTS} requests of each workload, not {num_requests}")
        if doubts:
            return f"No advice: {'; '.join(doubts)}. The highest median has {words}.", None
        low_end, high_end = gain.interval()
        if high_end <= 1 or gain.median < PAYS:
            return f"Serve without speculation. The best method here is {words}.", None
        if low_end <= 1:
            return (
                f"No advice: the interval of the best method, {low_end:.2f} to {high_end:.2f} times as fast as no "
                f"speculation, includes 1; more rounds narrow it. The highest median has {words}."
            ), None
        rivals = [name for name in list(gains)[1:] if name != best and gain.interval(gains[name])[0] <= 1]
        equal = f" ({', '.join(rivals)} may be as fast)" if rivals else ""
        return f"Serve with {words}{equal}.\n{serve_with(self.configs[best] or {})}", self.configs[best]

    def notes(self) -> Iterator[str]:
        """Yields the conditions of the run, and reasons for doubt."""
        yield FRESH
        if names := self.conditions["short"]:
            yield f"{', '.join(names)} has fewer prompts than requested, so rounds share them."
        for row in self.rows:
            if row.num_faults:
                yield f"{row.method} failed {row.num_faults} times ({row.cell}), which cost it drafts."
        plain, machine, done = [row for row in self.rows if row.method == NONE], self.machine, self.conditions
        if wide := [str(row.cell) for row in self.rows if row.ratio.is_wide]:
            cause = "rounds have different prompts, and other work may have loaded the machine"
            yield f"Ranges are wide ({'; '.join(dict.fromkeys(wide))}): {cause}."
        if timed := [str(row.cell) for row in plain if row.clock == "cpu"]:
            yield f"Times are CPU time of the engine's thread, because wall time was noisy ({'; '.join(timed)})."
        if looping := [str(row.cell) for row in plain if row.loops]:
            yield (
                f"Loops: more than half of the output repeats itself ({'; '.join(looping)}), which favours lookups: "
                "expect less on other text."
            )
        if any(row.num_different for row in self.rows) and machine.dtype != "float32":
            cause = "rounding depends on the number of tokens that a step verifies"
            yield f"Outputs in {machine.dtype} may differ: {cause}."
        if any(row.num_different is None for row in self.rows):
            yield "Sampled outputs are not compared; `verify-lossless` tests their distribution."
        packages = ", ".join(f"{name} {number}" for name, number in versions("vllm", "torch").items())
        turns = " in which the engines took turns" if done["together"] else ", one engine after the other"
        yield (
            f"{done['model']}; {done['rounds']} rounds{turns}, each of {done['prompts']} requests or more, with up to "
            f"{done['tokens']} tokens; {machine.device}; {machine.dtype}; Model Runner {machine.runner}; {packages}."
        )


def mean_ratio(rows: Sequence[Row]) -> Spread:
    """Returns the ratios of a method: in each round, the geometric mean over the cells."""
    return Spread.of([*map(statistics.geometric_mean, zip(*(row.ratio.rounds for row in rows), strict=True))])


def tell_cell(rows: Sequence[Row]) -> None:
    """Prints a cell as soon as it is done, so that an interruption loses only the cell that is being served."""
    figures = (f"{row.method} {_speed(row, rows[0]):.1f} tokens/s, {row.tokens_per_step:.2f} tok/step" for row in rows)
    say(f"{rows[0].cell}: {'; '.join(figures)}")


def _speed(row: Row, plain: Row) -> float:
    """Returns tokens per second for the table: the ratio times the speed of no speculation, so that the columns
    agree."""
    return plain.tokens_per_second * (1 if row is plain else row.ratio.median)


def tell(args: argparse.Namespace, report: Report, more: Mapping[str, Any] | None = None) -> int:
    """Prints and writes a report, with `more` facts in the file, and returns the exit status."""
    rows, machine, has_rates = report.rows, report.machine, any(row.cell.rate for row in report.rows)
    columns, (advice, chosen) = AT_RATES if has_rates else COLUMNS, report.verdict()
    cells = {row.cell: [each for each in rows if each.cell == row.cell] for row in rows}
    show_table(columns, {str(cell): [_figures(row, its[0], columns) for row in its] for cell, its in cells.items()})
    for words in (LEGEND + (RATES_LEGEND if has_rates else DECODING_LEGEND), *report.notes()):
        say(words)
    for name, config in report.configs.items():
        if config:
            say(f"{name}: {json.dumps(config)}")
    say(f"\n{advice}", style=None if report.is_lossless else "bold red")
    facts = {
        **report.conditions,
        "machine": asdict(machine),
        "versions": versions("vllm", "torch", "transformers"),
        "methods": dict(report.configs),
        "step_ms_by_tokens": dict(report.step_ms_by_tokens),
        "lossless": report.is_lossless,
        "rows": [asdict(row) | {"loops": row.loops} for row in rows],
        "notes": list(report.notes()),
        "advice": advice,
        "chosen": chosen,
        **(more or {}),
    }
    write_json(args.output_json, facts)
    return 0 if report.is_lossless else 1


def _figures(row: Row, plain: Row, columns: Sequence[str]) -> list[str]:
    same = "sampled" if row.num_different is None else f"{row.num_outputs - row.num_different}/{row.num_outputs}"
    figures = {
        "tokens/s": f"{_speed(row, plain):.1f}",
        "ratio": "1.00x" if row.method == NONE else str(row.ratio),
        "decoding alone": "1.00x" if row.method == NONE else str(row.decoding),
        "tok/step": f"{row.tokens_per_step:.2f}",
        "step cost": f"{row.tokens_per_step / row.decoding.median:.2f}",
        "first, ms": f"{row.first_ms:.0f}",
        "next, ms": f"{row.gap_ms[0]:.0f}, {row.gap_ms[1]:.0f}",
        "same": f"[bold red]{same}[/bold red]" if row.num_different else same,
    }
    return [row.method, *(figures[column] for column in columns)]
