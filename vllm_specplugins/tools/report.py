"""What all tools' reports share: tables of at most 100 columns, wrapped sentences, JSON and pictures."""

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError

WIDTH = 100


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


def write_json(facts: Mapping[str, Any], path: Path, option: str = "--json") -> None:
    """Writes a report; ConfigError where that cannot be."""
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{option} must be a file that can be written, not {path} ({error.strerror}).") from error


def save_picture(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib as PNG; ConfigError where that cannot be."""
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot must be a PNG file that can be written, not {path} ({error}).") from error
