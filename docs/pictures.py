"""Draws the pictures of README and docs from the data in docs/figures/ and docs/support.json.

python docs/pictures.py [FOLDER]    writes all of them, as SVG, into docs/pictures/ or FOLDER
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from tokenizers import Tokenizer

DOCS = Path(__file__).parent
INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
OURS, PEER, OTHER, GOOD, BAD = "#1565c0", "#ef8f00", "#8e24aa", "#2e7d32", "#c62828"
EVIDENCE = {
    "gpu": ("#2e7d32", "ran on an H100 (0.1.0)"),
    "cpu": ("#81c784", "tested on a CPU"),
    "simulated": ("#cddc39", "tested in Triton's interpreter or on simulated devices"),
    "refused": ("#ef9a9a", "refused at the start"),
    "untried": ("#e4e7eb", "untried"),
}
REQUEST, NEWEST, EARLIER = 5, 139, 109  # the step of picture `step`: a request of the trace, and two of its places
TASKS = {"instructcoder": "code edits", "cnn": "summaries", "sharegpt": "chat", "gsm8k": "maths"}
Facts = dict[str, Any]
# A white card is readable on light and on dark pages. Text stays text, so that files are small and can be searched.
STYLE = {
    **{"svg.fonttype": "none", "svg.hashsalt": "specplugins", "font.family": "sans-serif", "font.size": 10},
    **{"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GREY},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titlelocation": "left"},
}


def read(name: str) -> Facts:
    facts: Facts = json.loads((DOCS / name).read_text())
    return facts


def public() -> list[Facts]:
    """The replayed public answers."""
    rows: list[Facts] = read("figures/field_table.json")["public"]["rows"]
    return rows


def fastest(rows: list[Facts], task: str, batch: int, method: str, policy: str | None = None) -> Facts:
    """The row of the fastest K of a method."""
    keys = f"combined_{task}", batch, method
    matching = [row for row in rows if (row["task"], row["batch"], row["method"]) == keys]
    return max(
        (row for row in matching if policy in (None, row["policy"])),
        key=lambda row: row["speed_up"],
    )


def dots(axes: Axes, names: Sequence[str], series: dict[str, tuple[str, list[tuple[float, float, float]]]]) -> None:
    """Points with ranges: a row for each name, a colour for each series of (mean, low, high)."""
    for index, (label, (colour, points)) in enumerate(series.items()):
        offset = 0.16 * (2 * index - len(series) + 1)
        for row, (mean, low, high) in enumerate(points):
            place = row + offset
            axes.plot([low, high], [place, place], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="round")
            axes.plot(mean, place, "o", color=colour, markersize=6, label=label if row == 0 else None)
            axes.annotate(f"{mean:.2f}x", (high, place), (5, -3), textcoords="offset points", fontsize=8, color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(1, color=GREY, linewidth=1, linestyle="--")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)


def headline() -> Figure:
    """Speed-up by task: replayed answers of an 8B model, and a small model that was measured."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.5), width_ratios=(1, 1))
    rows = public()

    def replayed(method: str, policy: str | None = None) -> list[tuple[float, float, float]]:
        found = [fastest(rows, task, 1, method, policy) for task in TASKS]
        return [(row["speed_up"], row["low"], row["high"]) for row in found]

    dots(
        left,
        list(TASKS.values()),
        {
            "vLLM n-gram (best K)": (PEER, replayed("ngram_gpu")),
            "prompt_lookup": (OURS, replayed("prompt_lookup", "gated")),
            "lookup + EAGLE": (OTHER, replayed("cascade")),
        },
    )
    left.set_title("Simulated: Llama 3.1 8B answers, H100 costs")
    measured = [row for row in read("figures/spec_bench.json")["rows"] if row["part"] == "T 0" and "speed" in row]
    names = list(dict.fromkeys(row["task"] for row in measured))

    def of(method: str) -> list[tuple[float, float, float]]:
        speeds = [row["speed"] for row in measured if row["method"] == method]
        return [(speed["mean"], speed["low"], speed["high"]) for speed in speeds]

    words = [name.replace("_reasoning", "").replace("math", "maths").replace("_", "-") for name in names]
    dots(right, words, {"vLLM n-gram (K = 5)": (PEER, of("ngram:5")), "prompt_lookup": (OURS, of("prompt_lookup"))})
    right.set_title("Measured: Spec-Bench, SmolLM2-135M, CPU")
    for axes in (left, right):
        axes.set_xlim(right=axes.get_xlim()[1] + 0.35)
        axes.set_xlabel("speed relative to no speculation, one request")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 1.01))
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    return figure


def load() -> Figure:
    """Speed-up by number of requests, with and without the gate."""
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.4), sharex=True)
    rows, batches = public(), (1, 8, 32)
    arms = {
        "prompt_lookup": (OURS, "-", "prompt_lookup", "gated"),
        "prompt_lookup, gate off (K = 31)": (OURS, ":", "prompt_lookup", "always"),
        "vLLM ngram_gpu, best K": (PEER, "-", "ngram_gpu", None),
    }
    for axes, (task, words) in zip(
        panels,
        {"instructcoder": "Text that repeats: code edits", "gsm8k": "Text that hardly repeats: maths"}.items(),
        strict=True,
    ):
        for label, (colour, line, method, policy) in arms.items():
            found = [fastest(rows, task, batch, method, policy) for batch in batches]
            axes.plot(batches, [row["speed_up"] for row in found], line, color=colour, marker="o", label=label)
            low, high = ([row[key] for row in found] for key in ("low", "high"))
            axes.fill_between(batches, low, high, color=colour, alpha=0.10, linewidth=0)
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.set_ylim(bottom=0)
        axes.set_title(words)
        axes.set_xlabel("concurrent requests")
        axes.grid(color=FAINT)
    panels[0].set_ylabel("speed relative to no speculation")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    return figure


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes without decoration, in inches from the upper left corner."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, words: str, colour: str, **more: Any) -> None:
    """A rounded box with words in its middle."""
    text = {"color": "white", "fontsize": 9, "ha": "center", "va": "center", **more}
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", color=colour, linewidth=0)
    )
    axes.text(x + width / 2, y + height / 2, words, **text)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], words: str = "") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1.3})
    if words:
        across = abs(start[0] - end[0]) > abs(start[1] - end[1])
        place = (start[0] + end[0]) / 2 + (0 if across else 0.08), (start[1] + end[1]) / 2 - (0.09 if across else 0)
        axes.text(*place, words, fontsize=8.5, color=GREY, ha="center" if across else "left", va="center")


def token_row(axes: Axes, x: float, y: float, tokens: Sequence[str], colours: Sequence[str]) -> float:
    """Tokens in boxes, from left to right; the place after them."""
    for token, colour in zip(tokens, colours, strict=True):
        shown = token.replace("\n", "\\n").strip(" ") or "\u2423"
        width = 0.2 + 0.085 * len(shown)
        box(axes, x, y, width, 0.34, shown, colour, family="monospace")
        x += width + 0.05
    return x


def recorded_step() -> tuple[list[str], list[str], list[str]]:
    """A step of the engine that `check` replays: the match, the draft, and the tokens that the target emitted."""
    trace = json.loads((DOCS.parent / "vllm_specplugins" / "tools" / "trace.json").read_text())
    tokenizer = Tokenizer.from_file(str(DOCS.parent / "examples" / "demo" / "model" / "tokenizer.json"))
    tokens = trace["histories"][REQUEST]
    match, draft = tokens[NEWEST - 5 : NEWEST], tokens[EARLIER : EARLIER + 5]
    assert match == tokens[EARLIER - 5 : EARLIER]
    emitted = tokens[NEWEST : NEWEST + 4]
    return tuple([tokenizer.decode([token]) for token in part] for part in (match, draft, emitted))  # type: ignore


def step() -> Figure:
    """One step: a match in the context, its draft, and the verdict; below, the schedules of both runners."""
    figure, axes = canvas(9.6, 4.3)
    match, draft, emitted = recorded_step()
    edge, light = 0.2, "#5e92c8"
    num_accepted = len(emitted) - 1
    axes.text(edge, 0.3, "1  The newest tokens occurred before. The proposer copies what followed.", fontweight="bold")
    x = token_row(axes, edge, 0.5, [*match, *draft], [OURS] * len(match) + [light] * len(draft))
    x = token_row(axes, x, 0.5, ["..."], [GREY])
    token_row(axes, x, 0.5, match, [OURS] * len(match))
    note = {"fontsize": 8.5, "color": GREY, "va": "top"}
    axes.text(edge, 0.95, "dark blue: the match, twice; light blue: what followed, the draft", **note)
    axes.text(edge, 1.5, "2  The target verifies the draft in one pass, and adds one token.", fontweight="bold")
    verdict = [GOOD] * num_accepted + [BAD] + ["#b8c0c8"] * (len(draft) - num_accepted - 1)
    x = token_row(axes, edge, 1.7, draft, verdict)
    arrow(axes, (x + 0.1, 1.87), (x + 0.6, 1.87))
    token_row(axes, x + 0.7, 1.7, emitted, [GOOD] * num_accepted + [OTHER])
    axes.text(
        edge,
        2.16,
        "green: accepted; red: rejected, and the rest is dropped; violet: the target's token. "
        f"{len(emitted)} tokens in one step.",
        **note,
    )
    axes.text(edge, 2.72, "3  When the proposer runs", fontweight="bold")
    rows = {
        "V1: synchronous": [
            ("draft", 0.0, 0.45, OURS),
            ("target", 0.5, 1.6, INK),
            ("draft", 2.15, 0.45, OURS),
            ("target", 2.65, 1.6, INK),
            ("draft", 4.3, 0.45, OURS),
            ("target", 4.8, 1.6, INK),
        ],
        "V2: device": [
            ("target + draft", 0.0, 1.8, INK),
            ("target + draft", 1.85, 1.8, INK),
            ("target + draft", 3.7, 1.8, INK),
            ("target + draft", 5.55, 1.8, INK),
        ],
        "V2: host": [("schedule", 0.2, 1.0, GREY), ("schedule", 2.05, 1.0, GREY), ("schedule", 3.9, 1.0, GREY)],
    }
    for index, (name, parts) in enumerate(rows.items()):
        y = 2.95 + 0.42 * index
        axes.text(edge, y + 0.16, name, va="center")
        for words, start, width, colour in parts:
            box(axes, 1.6 + start, y, width, 0.32, words, colour, fontsize=8)
    return figure


QUESTIONS = (
    ("Do requests bring a JSON schema\nor a grammar?", "add the stage `grammar`"),
    ("Is there a drafter for your model\n(EAGLE, MTP, DFlash)?", "`cascade`:\n`prompt_lookup`, the drafter"),
    ("Does the output repeat\nits context?", "`prompt_lookup`"),
    ("Do requests resemble\nearlier requests?", "`suffix_lookup`"),
    ("Can you train a small part\n(minutes)?", "`cascade`:\n`prompt_lookup`, `jump`"),
)


def choose() -> Figure:
    """Which method: five questions."""
    figure, axes = canvas(9.6, 4.9)
    for index, (question, answer) in enumerate(QUESTIONS):
        y = 0.2 + 0.93 * index
        box(axes, 0.6, y, 3.3, 0.62, question, INK)
        box(axes, 5.6, y, 3.3, 0.62, answer.replace("`", ""), OURS, family="monospace", fontsize=8.5)
        words = "yes, and go on" if index == 0 else "yes"
        arrow(axes, (3.95, y + 0.31), (5.55, y + 0.31), words)
        if index + 1 < len(QUESTIONS):
            arrow(axes, (2.25, y + 0.65), (2.25, y + 0.91), "no" if index else "then")
    arrow(axes, (2.25, 4.57), (2.25, 4.79))
    axes.text(
        2.4,
        4.79,
        "no: serve without speculation, or with prompt_lookup, whose gate stops drafts that do not pay",
        fontsize=8.5,
        va="center",
    )
    return figure


def support() -> Figure:
    """The support matrix, coloured by evidence."""
    data = read("support.json")
    columns, rows = data["columns"], data["rows"]
    figure, axes = canvas(9.6, 0.9 + 0.34 * len(rows))
    left, width, top = 2.9, 0.545, 0.62
    for index, name in enumerate(columns):
        axes.text(
            left + (index + 0.5) * width,
            top - 0.08,
            name.replace(" ", "\n"),
            ha="center",
            va="bottom",
            fontsize=8.5,
            linespacing=0.95,
        )
    for line, (name, cells) in enumerate(rows.items()):
        y = top + 0.34 * line
        axes.text(left - 0.12, y + 0.16, name, ha="right", va="center", fontsize=8.5)
        for index, cell in enumerate(cells):
            axes.add_patch(
                FancyBboxPatch(
                    (left + index * width + 0.02, y + 0.02),
                    width - 0.04,
                    0.3,
                    linewidth=0,
                    boxstyle="round,pad=0,rounding_size=0.04",
                    color=EVIDENCE[cell][0],
                )
            )
    handles = [Patch(color=colour, label=words) for colour, words in EVIDENCE.values()]
    axes.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=8, columnspacing=1.0, handlelength=1.0
    )
    return figure


def grammar() -> Figure:
    """Who wrote the tokens of two JSON answers to one schema: the model or the grammar."""
    data = read("figures/grammar_answer.json")
    figure, axes = canvas(9.6, 2.75)
    y = 0.3
    for answer in data["answers"]:
        num_tokens = sum(map(len, answer["steps"]))
        words = f"{answer['name']}: {num_tokens} tokens in {len(answer['steps'])} steps"
        axes.text(0.2, y, words, fontweight="bold")
        x, y = 0.2, y + 0.16
        for tokens in answer["steps"]:
            for index, token in enumerate(tokens):
                shown = token.replace("\n", "\\n").replace(" ", "\u00b7") or "\u2205"
                width = 0.1 + 0.078 * len(shown)
                if x + width > 9.4:
                    x, y = 0.2, y + 0.34
                box(
                    axes,
                    x,
                    y,
                    width,
                    0.27,
                    shown,
                    INK if index + 1 == len(tokens) else GOOD,
                    fontsize=8,
                    family="monospace",
                )
                x += width + 0.03
        y += 0.75
    handles = [
        Patch(color=GOOD, label="forced by the grammar: drafted, verified, accepted"),
        Patch(color=INK, label="sampled by the model: one per step"),
    ]
    axes.legend(handles=handles, loc="lower left", ncols=2, frameon=False, fontsize=8.5)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "headline": headline,
    "load": load,
    "step": step,
    "choose": choose,
    "support": support,
    "grammar": grammar,
}


def main(folder: Path = DOCS / "pictures") -> None:
    for name, draw in PICTURES.items():
        with mpl.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
            plt.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
