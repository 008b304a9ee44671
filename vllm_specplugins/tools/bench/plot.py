"""The ratios as a picture: a panel for each temperature, bars by workload and requests at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.bench.figures import Cell, Row
from vllm_specplugins.tools.bench.methods import NONE

WIDTH, HEIGHT, DPI = 12, 4.5, 100  # inches of the picture and of a panel; 1200 pixels wide
LABELLED = 16  # bars in a panel that have room for their number


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A PNG: ratios to no speculation with their ranges, and what tokens per step would allow.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row.cell.temperature for row in rows))
    figure = Figure(figsize=(WIDTH, 0.6 + HEIGHT * len(temperatures)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(len(temperatures), 1, squeeze=False, sharey=True)[:, 0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        _panel(axes, [row for row in rows if row.cell.temperature == temperature and row.method != NONE])
        axes.set_title(f"temperature {temperature:g}", fontsize=12)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=10, loc="outside lower center", ncols=6)
    try:
        figure.savefig(path, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot must be a PNG file that can be written, not {path} ({error}).") from error


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    cells = list(dict.fromkeys(row.cell for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        own = [row for row in rows if row.method == method]
        places = [cells.index(row.cell) + (number - (len(methods) - 1) / 2) * width for row in own]
        ratios = [row.ratio for row in own]
        errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        medians = [ratio.median for ratio in ratios]
        axes.bar(places, medians, width * 0.92, yerr=errors, capsize=3, ecolor="0.3", color=f"C{number}", label=method)
        limits = [row.tokens_per_step for row in own]
        words = "tokens/step" if number == len(methods) - 1 else None
        axes.plot(places, limits, "_", color="black", ms=min(22.0, 300 * width / len(cells)), mew=1.5, label=words)
        if len(rows) <= LABELLED:
            for place, ratio in zip(places, ratios, strict=True):
                axes.annotate(
                    f"{ratio.median:.2f}x", (place, 0), (0, 4), textcoords="offset points", ha="center", color="white",
                    fontsize=10,
                )  # fmt: skip
    axes.axhline(1, color="0.4", lw=1, ls="--", label="no speculation")
    axes.set_xticks(range(len(cells)), [_name(cell) for cell in cells], fontsize=11)
    axes.set_ylabel("speed, of no speculation", fontsize=11)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.3)


def _name(cell: Cell) -> str:
    return f"{cell.workload}\nbatch {cell.batch}"
