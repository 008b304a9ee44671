"""What all tools' reports share: tables of at most 100 columns, wrapped sentences, JSON and pictures."""

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from operator import sub
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError

WIDTH = 100
Point = tuple[str, float, float, float]  # what it is of, a speed-up, and the ends of its range


def stdout() -> Console:
    """Where a report goes: as wide as the terminal, or WIDTH where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def table_of(first: str, columns: Iterable[str], title: str | None = None) -> Table:
    """A table with a column of names and others of figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(first, overflow="fold", max_width=30)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def show_table(console: Console, table: Table) -> None:
    """Prints all of it: a terminal that is narrower breaks the lines, and nothing is lost."""
    needed = Console(width=1000).measure(table).maximum
    Console(file=console.file, width=max(console.width, needed)).print(table)


def say(console: Console, words: str, style: str | None = None) -> None:
    """Prints sentences, wrapped; a line that begins with "--" is to be copied, and stays whole."""
    width = min(WIDTH, console.width)
    for line in words.split("\n"):
        wrapped = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        text = line if line.startswith("--") else wrapped
        console.print(text, highlight=False, soft_wrap=True, markup=False, style=style)


def serve_with(config: Mapping[str, Any]) -> str:
    """The argument of `vllm serve`, to be copied: on one line."""
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def versions(*more: str) -> dict[str, str]:
    """Of this package and of others."""
    return {name: version(name) for name in (*more, "vllm-specplugins")}


def check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError if --json or --plot cannot be written, or nothing can be drawn; before any work."""
    for option in ("json", "plot"):
        path: Path | None = getattr(args, option, None)
        if path and not path.parent.is_dir():
            raise ConfigError(f"--{option} must be a file in a folder that is there, not {path}.")
        if path and option == "plot" and find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib, which is not there (pip install 'vllm-specplugins[tools]').")


@contextmanager
def writing(option: str, kind: str, path: Path) -> Iterator[None]:
    """Raises ConfigError where what it holds cannot write to the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} must be a {kind} that can be written, not {path} ({cause}).") from error


def write_json(facts: Mapping[str, Any], path: Path) -> None:
    """Writes a report; ConfigError where that cannot be."""
    with writing("--json", "file", path):
        path.write_text(json.dumps(facts, indent=1) + "\n")


def plot(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[Point]]], color: str = "black") -> None:
    """A PNG of speed-ups and their ranges: a panel for each title, and in it a colour for each name.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(point[0] for named in panels.values() for points in named.values() for point in points))
    figure = Figure(figsize=(2 + (2 + 0.6 * len(places)) * len(panels), 5), layout="constrained")
    figure.suptitle(title, fontsize=11, color=color, wrap=True)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (panel, named) in zip(drawn, panels.items(), strict=True):
        for number, (name, points) in enumerate(named.items()):
            of, middle, low, high = map(list, zip(*points, strict=True))
            # Of few requests, what all of them had together may lie outside their range.
            errors = [[max(0.0, end) for end in map(sub, *ends)] for ends in ((middle, low), (high, middle))]
            aside = [places.index(place) + (number - len(named) / 2) * 0.5 / len(named) for place in of]
            axes.errorbar(aside, middle, errors, fmt="o", capsize=3, label=name)
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_xticks(range(len(places)), places)
        axes.set_title(panel, fontsize=11)
        axes.grid(axis="y", alpha=0.3)
    drawn[0].set_ylabel("speed-up over no speculation")
    figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    with writing("--plot", "PNG file", path):
        figure.savefig(path, dpi=100)
