"""What a calibration found: a table for the terminal, `calibration.json`, and a plot."""

import json
import shlex
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.tools.served import ServedRow
from vllm_specplugins.tools.speedup import Costs, Prediction

JSON_FILE, PLOT_FILE = "calibration.json", "calibration.png"
COLUMNS = ("layer", "same", "min(p, q)", "draft, ms", "of step", "best K", "tokens/step", "speed-up")
LEGEND = """\
same: how often the exit would have drafted the model's greedy token.
min(p, q): share of the exit's samples that is accepted at temperature 1.
draft: one draft token, in ms and as a share of a step without speculation."""
OTHERS_LEGEND = """\
Served with the most draft tokens; what fewer would bring is predicted.
drafts: share of steps that had one. accepted: share of the draft tokens.
a + b: a cascade of both. gated: a cascade of one, which drafts only what pays."""

MAX_SPREAD = 0.3  # a quiet machine stays below 0.1
DISTURBED = """\
Do not trust the speed-ups: equal steps took very different times, so something
else kept the machine busy. Repeat when it is idle, or with --together."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about one exit; `exit_head` is the folder of its head, if it has one of its own."""

    exit_layer: int
    exit_head: str | None
    match_rate: float
    overlap: float
    draft_ms: float
    prediction: Prediction

    def speculative_config(self) -> dict[str, Any]:
        """The value for vLLM's `--speculative-config`."""
        head = {"exit_head": self.exit_head} if self.exit_head else {}
        layer, num_draft = self.exit_layer, self.prediction.num_draft
        return {"method": "early_exit", "exit_layer": layer, **head, "num_speculative_tokens": num_draft}


@dataclass(frozen=True, slots=True)
class Findings:
    """All of a calibration.

    Args:
        conditions: what it was run with.
        costs: of steps and their parts.
        rows: one for each exit.
        others: one for each other method.
        num_tokens: of the outputs that the exits were compared with.
        spread: of the steps' times, interquartile range over median; of the worst engine.
    """

    conditions: dict[str, Any]
    costs: Costs
    rows: list[Row]
    others: list[ServedRow]
    num_tokens: int
    spread: float

    @property
    def disturbed(self) -> bool:
        """Whether steps that should take the same time did not."""
        return self.spread > MAX_SPREAD

    @property
    def best(self) -> Row | ServedRow | None:
        """The fastest; None if none is faster than no speculation."""
        rows: list[Row | ServedRow] = [*self.rows, *self.others]
        best = max(rows, key=lambda row: row.prediction.speed_up)
        return best if best.prediction.speed_up > 1 else None


def show(findings: Findings, console: Console) -> None:
    """Prints the table and the chosen configuration."""
    costs, best = findings.costs, findings.best
    table = Table(
        title="One request at a time, temperature 0", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in findings.rows:
        prediction = row.prediction
        table.add_row(
            f"{row.exit_layer}{' + head' if row.exit_head else ''}",
            f"{row.match_rate:.1%}",
            f"{row.overlap:.1%}",
            f"{row.draft_ms:.2f}",
            f"{row.draft_ms / costs.plain_ms:.0%}",
            str(prediction.num_draft),
            f"{prediction.tokens_per_step:.2f}",
            f"{prediction.speed_up:.2f}x",
            style="bold" if row is best else None,
        )
    console.print(table)
    console.print(LEGEND, highlight=False)
    if findings.others:
        console.print(_others(findings))
        console.print(OTHERS_LEGEND, highlight=False)
    verified = " and ".join(f"{ms:.1f} ms with {num_draft}" for num_draft, ms in costs.verify_ms.items())
    console.print(f"A step takes {costs.plain_ms:.1f} ms; to verify draft tokens, {verified}.", highlight=False)
    console.print(f"Compared on {findings.num_tokens:,} output tokens.\n", highlight=False)
    if findings.disturbed:
        console.print(DISTURBED + "\n")
    if best is None:
        console.print("Speculation does not pay here: serve this model without it.")
        return
    console.print(f"Fastest: {best.prediction.speed_up:.2f}x is predicted with", highlight=False)
    config = shlex.quote(json.dumps(best.speculative_config()))
    console.print(f"--speculative-config {config}", highlight=False, soft_wrap=True)


def _others(findings: Findings) -> Table:
    table = Table(title="Other methods", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for title in ("drafts", "accepted", "best K", "tokens/step", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in findings.others:
        found = row.prediction
        share, accepted, tokens = f"{row.share:.0%}", f"{row.accepted:.0%}", f"{found.tokens_per_step:.2f}"
        style = "bold" if row is findings.best else None
        table.add_row(row.name, share, accepted, str(found.num_draft), tokens, f"{found.speed_up:.2f}x", style=style)
    return table


def write(findings: Findings, folder: Path) -> None:
    """Writes `calibration.json` and the plot."""
    best = findings.best
    versions = {name: version(name) for name in ("vllm", "torch", "transformers", "vllm-specplugins")}
    chosen = best.speculative_config() if best else None
    facts = {**asdict(findings), "disturbed": findings.disturbed, "chosen": chosen, "versions": versions}
    (folder / JSON_FILE).write_text(json.dumps(facts, indent=1) + "\n")
    plot(findings, folder / PLOT_FILE)


def plot(findings: Findings, path: Path) -> None:
    """A PNG: agreement by layer, and the predicted speed-up by layer with the K that it takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    own = [row for row in findings.rows if not row.exit_head]
    headed = [row for row in findings.rows if row.exit_head]
    for rows, marker, suffix in ((own, "o-", ""), (headed, "*", ", trained head")):
        if not rows:
            continue
        layers = [row.exit_layer for row in rows]
        size = 12 if marker == "*" else 5
        left.plot(layers, [row.match_rate for row in rows], marker, color="C0", ms=size, label=f"same token{suffix}")
        left.plot(layers, [row.overlap for row in rows], marker, color="C1", ms=size, label=f"min(p, q){suffix}")
        speed_ups = [row.prediction.speed_up for row in rows]
        right.plot(layers, speed_ups, marker, color="C2", ms=size, label=f"best K{suffix}")
        for row, speed_up in zip(rows, speed_ups, strict=True):
            place, label = (row.exit_layer, speed_up), f"K = {row.prediction.num_draft}"
            right.annotate(label, place, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    left.set(title="Agreement with the full model", xlabel="exit layer", ylim=(0, 1.02))
    right.set(title="Predicted speed-up, one request, greedy", xlabel="exit layer")
    for index, other in enumerate(findings.others):
        words = f"{other.name}, K = {other.prediction.num_draft}"
        right.axhline(other.prediction.speed_up, color=f"C{3 + index}", lw=1, ls=":", label=words)
    right.axhline(1, color="gray", lw=1, ls="--", label="no speculation")
    right.margins(y=0.15)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
