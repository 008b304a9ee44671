"""Writes docs/commands.md, the interface in docs/write-a-proposer.md, and the tables of docs/metrics.md and
docs/support.md from the code and docs/support.json: `python docs/reference.py`."""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from vllm_specplugins import device, draft
from vllm_specplugins.__main__ import parser
from vllm_specplugins.engine.metrics.names import LABELS, PREFIX, TABLE

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from configuration import arguments, begun  # noqa: E402

WRITTEN = "<!-- Written by docs/reference.py. -->"
BLOCK = re.compile(r"(<!-- Written by docs/reference\.py from .*? -->\n).*?(<!-- End of the \w+\. -->)", re.DOTALL)
SIMPLE = re.compile(r"(int|float|str|bool)( \| None)?")  # types that say more than the docstring
WORDS = {"gpu": "GPU", "cpu": "CPU", "simulated": "sim.", "refused": "no", "untried": "-"}


def flag(action: argparse.Action) -> str:
    """An argument as a line of a list."""
    name = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    value = action.metavar or (action.choices and "|".join(map(str, action.choices)))
    taken = f" *{value}*" if value and action.option_strings else ""
    needed = " (required)" if action.required and action.option_strings else ""
    return f"- {name}{taken}{needed}: {begun(action.help or '').rstrip('.')}.".replace("%%", "%")


def commands() -> Iterator[str]:
    root = parser()
    yield from ("# Commands", "", WRITTEN, "", f"`{root.prog} COMMAND --help` prints the same.", "")
    [choices] = [action.choices for action in root._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in choices.items():
        yield from (f"## `{name}`", "", " ".join((command.description or "").split()), "")
        epilog = (command.epilog or "") % {"prog": command.prog}
        example, _, rest = " ".join(epilog.split()).removeprefix("Example: ").partition(". ")
        if example:
            yield from ("```bash", example, "```", "")
        if rest:
            yield from (rest, "")
        for action in command._actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                yield flag(action)
        yield ""


def api() -> Iterator[str]:
    yield from ("Modules `vllm_specplugins.draft` and `vllm_specplugins.device`. " + paragraph(draft.__doc__), "")
    modules = draft, device
    classes = [
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    ]
    for owner in classes:
        yield from (f"### `{owner.__name__}`", "", paragraph((owner.__doc__ or "").partition("Args:")[0]), "")
        types = {field.name: field.type for field in fields(owner)} if is_dataclass(owner) else {}
        for name, words in arguments(owner).items():
            kind = getattr(types.get(name), "__name__", str(types.get(name, "")))
            shown = f" ({kind})" if SIMPLE.fullmatch(kind) else ""
            yield f"- `{name}`{shown}: {begun(words)}"
        for name, method in vars(owner).items():
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function):
                signature = re.sub(r"self, |cls, |(\w+\.)+|'", "", str(inspect.signature(function)))
                yield f"- `{name}{signature}`: {paragraph(function.__doc__)}"
        yield ""


def metrics() -> Iterator[str]:
    labels = ", ".join(f"`{name}`" for name in LABELS)
    yield f"Each name begins with `{PREFIX}`. Each metric has the labels {labels}, and those of its row."
    yield from ("", "| metric | kind | further labels | meaning |", "|---|---|---|---|")
    for metric in TABLE:
        name = f"`{metric.name}{'_total' * (metric.kind == 'counter')}`"
        more = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        yield f"| {name} | {metric.kind} | {more} | {metric.words} |"


def matrix() -> Iterator[str]:
    data = json.loads((DOCS / "support.json").read_text())
    yield f"| | {' | '.join(data['columns'])} |"
    yield f"|---|{'---|' * len(data['columns'])}"
    for name, cells in data["rows"].items():
        yield f"| {name} | {' | '.join(WORDS[cell] for cell in cells)} |"


def paragraph(text: str | None) -> str:
    """A docstring's text in one line."""
    return " ".join((text or "").split())


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": commands,
    "write-a-proposer.md": api,
    "metrics.md": metrics,
    "support.md": matrix,
}


def page(name: str) -> str:
    """A page as it is now: generated, or by hand with a generated block."""
    text, made = (DOCS / name).read_text(), "\n".join(PAGES[name]()).rstrip()
    if not BLOCK.search(text):
        return made + "\n"
    return BLOCK.sub(lambda block: f"{block[1]}\n{made}\n\n{block[2]}", text)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name))
