"""Draws the pictures of README and docs from the data in docs/figures/ and docs/support.json.

python docs/pictures.py [FOLDER]    writes all of them, as SVG, into docs/pictures/ or FOLDER

NAME-narrow.svg is the form for phones, which docs/assets/extra.css puts in the place of NAME.svg.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from diagrams import choose, grammar, step, support
from drawing import DOCS, FAINT, GREY, OTHER, OURS, PEER, STYLE, Facts, read
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from panels import dashboard

SPEC_BENCH = {
    **{"mt_bench": "MT-Bench", "translation": "translation", "summarization": "summaries", "qa": "questions"},
    **{"math_reasoning": "maths", "rag": "retrieval"},
}
TASKS = {"instructcoder": "code edits", "cnn": "summaries", "sharegpt": "chat", "gsm8k": "maths"}


def public() -> list[Facts]:
    """The replayed public answers."""
    rows: list[Facts] = read("figures/field_table.json")["public"]["rows"]
    return rows


def fastest(rows: list[Facts], task: str, batch: int, method: str, policy: str | None = None) -> Facts:
    """The row of the fastest K of a method."""
    keys = f"combined_{task}", batch, method
    matching = [row for row in rows if (row["task"], row["batch"], row["method"]) == keys]
    return max((row for row in matching if policy in (None, row["policy"])), key=lambda row: row["speed_up"])


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


def panels(narrow: bool, height: float, **more: Any) -> tuple[Figure, list[Axes]]:
    """Two panels beside each other, or below each other on a phone."""
    shape = (2, 1) if narrow else (1, 2)
    figure, axes = plt.subplots(*shape, figsize=(4.6, 2.1 * height) if narrow else (9.6, height), **more)
    return figure, list(axes)


def legend(figure: Figure, axes: Axes, narrow: bool) -> None:
    """The legend of all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if narrow else 3
    figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, bbox_to_anchor=(0.5, 1.01))
    figure.tight_layout(rect=(0, 0, 1, 0.89 if narrow else 0.93))


def headline(narrow: bool) -> Figure:
    """Speed-up by task: replayed answers of an 8B model, and a small model that was measured."""
    figure, (left, right) = panels(narrow, 3.5)
    rows = public()

    def replayed(method: str, policy: str | None = None) -> list[tuple[float, float, float]]:
        found = [fastest(rows, task, 1, method, policy) for task in TASKS]
        return [(row["speed_up"], row["low"], row["high"]) for row in found]

    dots(
        left,
        list(TASKS.values()),
        {
            "vLLM n-gram": (PEER, replayed("ngram_gpu")),
            "prompt_lookup": (OURS, replayed("prompt_lookup", "gated")),
            "prompt_lookup, then EAGLE": (OTHER, replayed("cascade")),
        },
    )
    left.set_title("Simulated: Llama 3.1 8B answers, H100 costs")
    measured = [row for row in read("figures/spec_bench.json")["rows"] if row["part"] == "T 0" and "speed" in row]
    names = list(dict.fromkeys(row["task"] for row in measured))

    def of(method: str) -> list[tuple[float, float, float]]:
        speeds = [row["speed"] for row in measured if row["method"] == method]
        return [(speed["mean"], speed["low"], speed["high"]) for speed in speeds]

    dots(
        right,
        [SPEC_BENCH[name] for name in names],
        {"vLLM n-gram": (PEER, of("ngram:5")), "prompt_lookup": (OURS, of("prompt_lookup"))},
    )
    right.set_title("Measured: Spec-Bench, SmolLM2-135M, CPU")
    for axes in (left, right):
        axes.set_xlim(right=axes.get_xlim()[1] + 0.35)
        axes.set_xlabel("speed relative to no speculation, one request")
    legend(figure, left, narrow)
    return figure


def load(narrow: bool) -> Figure:
    """Speed-up by number of requests, with and without the gate."""
    figure, both = panels(narrow, 3.4, sharex=not narrow, sharey=True)
    rows, batches = public(), (1, 8, 32)
    arms = {
        "prompt_lookup": (OURS, "-", "prompt_lookup", "gated"),
        "prompt_lookup, gate off (K = 31)": (OURS, ":", "prompt_lookup", "always"),
        "vLLM ngram_gpu, best K": (PEER, "-", "ngram_gpu", None),
    }
    for axes, (task, words) in zip(
        both,
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
    for axes in both[: 1 + narrow]:
        axes.set_ylabel("speed relative to no speculation")
    legend(figure, both[0], narrow)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "headline": partial(headline, narrow=False),
    "headline-narrow": partial(headline, narrow=True),
    "load": partial(load, narrow=False),
    "load-narrow": partial(load, narrow=True),
    "step": step,
    "choose": choose,
    "support": partial(support, narrow=False),
    "support-narrow": partial(support, narrow=True),
    "grammar": partial(grammar, right=9.4),
    "grammar-narrow": partial(grammar, right=4.4),
    "dashboard": partial(dashboard, columns=3),
    "dashboard-narrow": partial(dashboard, columns=2),
}


def main(folder: Path = DOCS / "pictures") -> None:
    for name, draw in PICTURES.items():
        with mpl.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
            plt.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
