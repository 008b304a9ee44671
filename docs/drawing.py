"""Colours, fonts, data, and boxes on a canvas, for all pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
OURS, PEER, OTHER, GOOD, BAD = "#1565c0", "#ef8f00", "#8e24aa", "#2e7d32", "#c62828"
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
