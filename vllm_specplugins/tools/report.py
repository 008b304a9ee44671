"""Writes the parts of all reports: tables of at most 100 columns, wrapped sentences, and JSON."""

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import ConfigError

WIDTH = 100


def stdout() -> Console:
    """Returns a console as wide as the terminal, or WIDTH without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show_table(columns: Sequence[str], sections: Mapping[str, Sequence[Sequence[str]]], first: str = "") -> None:
    """Prints rows, each beginning with its name, under a title or ""; cells may contain markup. A narrow terminal
    breaks lines."""
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
    """Prints and wraps sentences. A line that begins with "--" is meant for copying and is not wrapped."""
    for line in text.split("\n"):
        whole = line.startswith("--")
        stdout().print(line, width=WIDTH, highlight=False, soft_wrap=whole, markup=False, emoji=False, style=style)


def serve_with(config: Mapping[str, Any]) -> str:
    """Returns the argument of `vllm serve`, on one line for copying."""
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in (*packages, "vllm-specplugins")}


def check_json(args: argparse.Namespace) -> None:
    """Raises ConfigError, before any work, if --output-json cannot be written."""
    if args.output_json and (args.output_json.is_dir() or not args.output_json.parent.is_dir()):
        raise ConfigError(f"--output-json must be a file in an existing folder, not {args.output_json}.")


@contextmanager
def writing(option: str, kind: str, path: Path) -> Iterator[None]:
    """Raises ConfigError if its block cannot write to the path."""
    try:
        yield
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} must be a writable {kind}, not {path} ({cause}).") from error


def write_json(path: Path | None, facts: Mapping[str, Any]) -> None:
    """Writes the file of --output-json, if any, completely, or raises ConfigError and leaves the old file."""
    if path is None:
        return
    data = json.dumps(facts, indent=1).encode() + b"\n"
    with writing("--output-json", "file", path):
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_bytes(data)
            return
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
