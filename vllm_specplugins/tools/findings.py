"""What a calibration found: tables for the terminal, `calibration.json`, and a plot."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplugins.tools.report import save_picture, say, serve_with, show_table, table_of, versions
from vllm_specplugins.tools.served import ServedRow
from vllm_specplugins.tools.speedup import Costs, Prediction

JSON_FILE = "calibration.json"
COLUMNS = ("same", "min(p, q)", "draft, ms", "of step", "best K", "tok/step", "speed-up")
LEGEND = (
    "same: how often the exit would have drafted the model's greedy token. min(p, q): share of the exit's samples that "
    "is accepted at temperature 1. draft: one draft token, in ms and as a share of a step without speculation."
)
OTHER_COLUMNS = ("drafts", "accepted", "best K", "tok/step", "speed-up")
OTHERS_LEGEND = (
    "Served with the most draft tokens; what fewer would bring is predicted. drafts: share of steps that had one. "
    "accepted: share of the draft tokens. a + b: a cascade of both. gated: a cascade of one, which drafts only what "
    "pays."
)

MAX_SPREAD = 0.3  # a quiet machine stays below 0.1
MIN_PROMPTS = 8
DISTURBED = (
    "Do not trust the speed-ups: equal steps took very different times, so something else kept the machine busy. "
    "Repeat when it is idle, or with --together."
)
FEW = f"Do not trust the speed-ups: they are from fewer than {MIN_PROMPTS} prompts."


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
    def doubt(self) -> str | None:
        """Why the speed-ups are not to be trusted, if they are not."""
        if self.spread > MAX_SPREAD:  # steps that should take the same time did not
            return DISTURBED
        return FEW if self.conditions["prompts"] < MIN_PROMPTS else None

    @property
    def best(self) -> Row | ServedRow | None:
        """The fastest; None if none is faster than no speculation."""
        rows: list[Row | ServedRow] = [*self.rows, *self.others]
        best = max(rows, key=lambda row: row.prediction.speed_up)
        return best if best.prediction.speed_up > 1 else None


def show(findings: Findings, console: Console) -> None:
    """Prints the tables and the chosen configuration."""
    costs, best = findings.costs, findings.best
    table = table_of("layer", COLUMNS, "One request at a time, temperature 0")
    for row in findings.rows:
        figures = f"{row.match_rate:.1%}", f"{row.overlap:.1%}", f"{row.draft_ms:.2f}"
        share, layer = f"{row.draft_ms / costs.plain_ms:.0%}", f"{row.exit_layer}{' + head' if row.exit_head else ''}"
        table.add_row(layer, *figures, share, *_predicted(row), style="bold" if row is best else None)
    show_table(console, table)
    say(console, LEGEND)
    if findings.others:
        others = table_of("method", OTHER_COLUMNS, "\nOther methods")
        for other in findings.others:
            style = "bold" if other is best else None
            others.add_row(other.name, f"{other.share:.0%}", f"{other.accepted:.0%}", *_predicted(other), style=style)
        show_table(console, others)
        say(console, OTHERS_LEGEND)
    verified = " and ".join(f"{ms:.1f} ms with {num_draft}" for num_draft, ms in costs.verify_ms.items())
    say(console, f"A step takes {costs.plain_ms:.1f} ms; to verify draft tokens, {verified}.")
    say(console, f"Compared on {findings.num_tokens:,} output tokens.\n")
    if findings.doubt:
        say(console, f"{findings.doubt} No advice.")
    elif best is None:
        say(console, "Speculation does not pay here: serve this model without it.")
    else:
        say(console, f"Fastest: {best.prediction.speed_up:.2f}x is predicted with")
        say(console, serve_with(best.speculative_config()))


def _predicted(row: Row | ServedRow) -> tuple[str, str, str]:
    found = row.prediction
    return str(found.num_draft), f"{found.tokens_per_step:.2f}", f"{found.speed_up:.2f}x"


def facts(findings: Findings) -> dict[str, Any]:
    """The findings as JSON takes them; nothing is chosen where the figures are not to be trusted."""
    chosen = findings.best.speculative_config() if findings.best and not findings.doubt else None
    made = versions("vllm", "torch", "transformers")
    return {**asdict(findings), "doubt": findings.doubt, "chosen": chosen, "versions": made}


def plot(findings: Findings, path: Path) -> None:
    """A PNG: agreement by layer, and the predicted speed-up by layer with the K that it takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    if findings.doubt:
        figure.suptitle(findings.doubt, color="C3", fontsize=10, wrap=True)
    left, right = figure.subplots(1, 2)
    own = [row for row in findings.rows if not row.exit_head]
    headed = [row for row in findings.rows if row.exit_head]
    for rows, marker, suffix in ((own, "o-", ""), (headed, "*", ", trained head")):
        if not rows:
            continue
        layers = [row.exit_layer for row in rows]
        size = 12 if marker == "*" else 5
        same, overlap = f"same token at temperature 0{suffix}", f"accepted at temperature 1{suffix}"
        left.plot(layers, [row.match_rate for row in rows], marker, color="C0", ms=size, label=same)
        left.plot(layers, [row.overlap for row in rows], marker, color="C1", ms=size, label=overlap)
        speed_ups = [row.prediction.speed_up for row in rows]
        right.plot(layers, speed_ups, marker, color="C2", ms=size, label=f"exit, best K{suffix}")
        for row, speed_up in zip(rows, speed_ups, strict=True):
            place, label = (row.exit_layer, speed_up), f"K = {row.prediction.num_draft}"
            right.annotate(label, place, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    left.set(title="Agreement with the full model", ylabel="share of tokens", ylim=(0, 1.02))
    right.set(title="One request, greedy", ylabel="predicted speed-up over no speculation")
    for index, other in enumerate(findings.others):
        words = f"{other.name}, K = {other.prediction.num_draft}"
        right.axhline(other.prediction.speed_up, color=f"C{3 + index}", lw=1.2, ls=":", label=words)
    right.axhline(1, color="gray", lw=1, ls="--", label="no speculation")
    right.margins(y=0.15)
    for axes in (left, right):
        axes.set_xlabel("exit layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    save_picture(figure, path)
