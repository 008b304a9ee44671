"""The ratios as a picture: a panel for each temperature, bars by workload and requests at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specplugins.tools.bench.figures import Cell, Row
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.report import save_picture

HEIGHT = 4.5  # inches of a panel
BAR, LEAST, MOST = 0.55, 5.0, 16.0  # inches of a bar, and of the picture's width
LABELLED = 24  # bars in a panel that have room for their number


def plot(rows: Sequence[Row], title: str, path: Path, doubt: str | None = None) -> None:
    """A PNG: ratios to no speculation with their ranges, and what tokens per step would allow.

    Args:
        doubt: why the figures are not to be trusted, if they are not.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row.cell.temperature for row in rows))
    drawn = [[row for row in rows if (row.cell.temperature, row.method == NONE) == (t, False)] for t in temperatures]
    width = min(MOST, max(LEAST, 2 + BAR * max(map(len, drawn))))
    figure = Figure(figsize=(width, 0.9 + HEIGHT * len(temperatures)), layout="constrained")
    figure.suptitle("\n".join(filter(None, (title, doubt))), fontsize=11, color="C3" if doubt else "black", wrap=True)
    panels = figure.subplots(len(temperatures), 1, squeeze=False, sharey=True)[:, 0]
    for axes, temperature, own in zip(panels, temperatures, drawn, strict=True):
        _panel(axes, own)
        axes.set_title(f"temperature {temperature:g}", fontsize=11)
    columns = max(1, int(width // 2.2))
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=columns)
    save_picture(figure, path)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    cells = list(dict.fromkeys(row.cell for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    width = min(0.35, 0.8 / len(methods))
    for number, method in enumerate(methods):
        own = [row for row in rows if row.method == method]
        places = [cells.index(row.cell) + (number - (len(methods) - 1) / 2) * width for row in own]
        ratios = [row.ratio for row in own]
        errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        medians = [ratio.median for ratio in ratios]
        axes.bar(places, medians, width * 0.92, yerr=errors, capsize=3, ecolor="0.3", color=f"C{number}", label=method)
        limits = [row.tokens_per_step for row in own]
        words = "tokens/step" if number == len(methods) - 1 else None
        ends = [place - width * 0.46 for place in places], [place + width * 0.46 for place in places]
        axes.hlines(limits, *ends, color="black", lw=1.5, label=words)
        if len(rows) <= LABELLED:
            for place, ratio in zip(places, ratios, strict=True):
                axes.annotate(
                    f"{ratio.median:.2f}x", (place, ratio.high), (0, 3), textcoords="offset points", ha="center",
                    fontsize=8,
                )  # fmt: skip
    axes.axhline(1, color="0.4", lw=1, ls="--", label="no speculation")
    axes.set_xticks(range(len(cells)), [_name(cell) for cell in cells], fontsize=10)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.set_ylabel("speed-up over no speculation", fontsize=10)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.3)


def _name(cell: Cell) -> str:
    return f"{cell.workload}\n{cell.batch} at a time"
