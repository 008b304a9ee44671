"""What all tools' reports share: tables of at most 100 columns, wrapped sentences, JSON and pictures."""

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError
from vllm_specplugins.structures.whole_file import write_all, write_whole

WIDTH = 100
# Panel and name in it, what it is of, a speed-up, and the ends of its range.
Points = Sequence[tuple[str, str, str, float, float, float]]


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
    for line in words.split("\n"):
        whole = line.startswith("--")
        console.print(line, width=WIDTH, highlight=False, soft_wrap=whole, markup=False, emoji=False, style=style)


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
        if path and (path.is_dir() or not path.parent.is_dir()):
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


def write_file(option: str, kind: str, path: Path, data: bytes) -> None:
    """Writes a file as a whole, or else the old one stays; ConfigError where that cannot be."""
    with writing(option, kind, path):
        if path.exists() and not path.is_file():  # a terminal or a pipe, to which somebody must listen
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(descriptor, True)
            write_all(descriptor, data)
        else:
            os.umask(mask := os.umask(0))
            mode = path.stat().st_mode if path.exists() else 0o666 & ~mask
            descriptor = write_whole(path, data)
            os.fchmod(descriptor, mode)
        os.close(descriptor)


def write_json(facts: Mapping[str, Any], path: Path) -> None:
    """Writes a report; ConfigError where that cannot be."""
    write_file("--json", "file", path, json.dumps(facts, indent=1).encode() + b"\n")


def publish(args: argparse.Namespace, facts: Mapping[str, Any], title: str, points: Points) -> None:
    """Writes a report and draws a picture of it, where the user wants them."""
    if args.json:
        write_json(facts, args.json)
    if args.plot:
        plot(args.plot, title, points)


def plot(path: Path, title: str, points: Points) -> None:
    """A PNG of speed-ups and their ranges, a colour for each name; ConfigError where it cannot be written."""
    from matplotlib.figure import Figure

    panels, names, places = (list(dict.fromkeys(parts)) for parts in list(zip(*points, strict=True))[:3])
    figure = Figure(figsize=(2 + (2 + 0.6 * len(places)) * len(panels), 5), layout="constrained")
    figure.suptitle(title, fontsize=11, wrap=True)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(drawn, panels, strict=True):
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_xticks(range(len(places)), places)
        axes.set_title(panel, fontsize=11)
    for panel, name, of, middle, low, high in points:
        axes, number = drawn[panels.index(panel)], names.index(name)
        at, color = places.index(of) + (number - len(names) / 2) * 0.5 / len(names), f"C{number}"
        axes.vlines(at, low, high, color=color)
        axes.plot(at, middle, "o", color=color)
    drawn[0].set_ylabel("speed-up over no speculation")
    handles = [drawn[0].plot([], [], "o", color=f"C{number}", label=name)[0] for number, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, dpi=100, format="png")
    write_file("--plot", "PNG file", path, picture.getvalue())
