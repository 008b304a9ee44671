"""Parts of all reports: tables of at most 100 columns, wrapped sentences, JSON and pictures."""

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
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

WIDTH = 100
# Panel, name and place of a point, its speed-up, and the ends of its range.
Points = Sequence[tuple[str, str, str, float, float, float]]


def stdout() -> Console:
    """A console as wide as the terminal, or WIDTH where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show_table(columns: Sequence[str], sections: Mapping[str, Sequence[Sequence[str]]], first: str = "") -> None:
    """Prints rows, each with its name first, by title or ""; cells may hold markup. A narrow terminal breaks lines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(first, overflow="fold", max_width=30)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for title, rows in sections.items():
        table.add_section()
        if title:
            table.add_row(f"[bold]{title}[/bold]")
        for name, *figures in rows:
            table.add_row(f"{'  ' * bool(title)}{name}", *figures)
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(stdout().width, needed)).print(table)


def say(text: str, style: str | None = None) -> None:
    """Prints sentences and wraps them; a line that begins with "--" is for copying and stays whole."""
    for line in text.split("\n"):
        whole = line.startswith("--")
        stdout().print(line, width=WIDTH, highlight=False, soft_wrap=whole, markup=False, emoji=False, style=style)


def serve_with(config: Mapping[str, Any]) -> str:
    """The argument of `vllm serve`, on one line for copying."""
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in (*packages, "vllm-specplugins")}


def check_files(args: argparse.Namespace) -> None:
    """Raises ConfigError, before any work, if --json or --plot cannot be written or nothing can be drawn."""
    for option in ("json", "plot"):
        path: Path | None = getattr(args, option, None)
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"--{option} must be a file in a folder that is there, not {path}.")
        if path and option == "plot" and find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib, which is not there (pip install 'vllm-specplugins[tools]').")


@contextmanager
def writing(option: str, kind: str, path: Path) -> Iterator[None]:
    """Raises ConfigError where its block cannot write to the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} must be a {kind} that can be written, not {path} ({cause}).") from error


def write_file(option: str, kind: str, path: Path, data: bytes) -> None:
    """Writes a whole file, or raises ConfigError and leaves the old one."""
    with writing(option, kind, path):
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_bytes(data)
            return
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def publish(args: argparse.Namespace, facts: Mapping[str, Any], title: str = "", points: Points = ()) -> None:
    if args.json:
        write_file("--json", "file", args.json, json.dumps(facts, indent=1).encode() + b"\n")
    if points and args.plot:
        write_file("--plot", "PNG file", args.plot, picture(title, points))


def picture(title: str, points: Points) -> bytes:
    from matplotlib.figure import Figure

    panels, names, places = (list(dict.fromkeys(parts)) for parts in list(zip(*points, strict=True))[:3])
    figure = Figure(figsize=(2 + (2 + 0.6 * len(places)) * len(panels), 5), layout="constrained")
    figure.suptitle(title, fontsize=11, wrap=True)
    drawn = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(drawn, panels, strict=True):
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_xticks(range(len(places)), places)
        axes.set_title(panel, fontsize=11)
    for panel, name, place, middle, low, high in points:
        axes, number = drawn[panels.index(panel)], names.index(name)
        at, color = places.index(place) + (number - len(names) / 2) * 0.5 / len(names), f"C{number}"
        axes.vlines(at, low, high, color=color)
        axes.plot(at, middle, "o", color=color)
    drawn[0].set_ylabel("speed-up over no speculation")
    handles = [drawn[0].plot([], [], "o", color=f"C{number}", label=name)[0] for number, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    file = BytesIO()
    figure.savefig(file, dpi=100, format="png")
    return file.getvalue()
