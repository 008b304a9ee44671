"""What a training found: a table on the terminal, and a model card beside the weights."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.scores import Scores

COLUMNS = ("", "same token, %", "min(p, q), %", "T 0", "T 1")
MEANING = (
    "On what the model says behind the beginnings of held-out rows. Of each draft token, if those before it are right: "
    "same token, as the model's, at temperature 0; min(p, q), accepted at temperature 1 if drafts are probabilistic. "
    "T 0, T 1: tokens a step, which is an engine's acceptance length with the K below; at temperature 1 with "
    "draft_sample_method greedy, coupled and probabilistic."
)
CARD = """\
# {method} for {model}

A small part that drafts for speculative decoding on the states of {model}, which stays as it is. To serve with it, with
vllm-specplugins installed:

    vllm serve {model} --speculative-config {config}

## On {num_tokens:,} tokens

{table}

{meaning}

## How it was trained

{settings}

The weights were made from those of {model} and from the text: their licences bind it.
"""


def show(before: Scores, after: Scores, config: dict[str, Any], out: Path, num_tokens: int) -> None:
    """Prints the scores and what to serve with."""
    console = Console()
    table = Table(title=f"On {num_tokens:,} tokens", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in _rows(before, after):
        table.add_row(*row)
    console.print(table)
    if after.length <= before.length:
        console.print("It is no better than it began: train it for longer, or leave it out.")
    console.print(MEANING, highlight=False)
    console.print(f"Saved in {out}. To serve with it:", highlight=False, soft_wrap=True)
    console.print(f"--speculative-config {_quoted(config)}", highlight=False, soft_wrap=True)


def card(before: Scores, after: Scores, config: dict[str, Any], settings: Settings, num_tokens: int) -> str:
    """The model card, in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *_rows(before, after)]
    fields = [f"* {name.replace('_', ' ')}: {value}" for name, value in asdict(settings).items() if value is not None]
    return CARD.format(
        method=config["method"],
        model=settings.model,
        config=_quoted(config),
        num_tokens=num_tokens,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        meaning=MEANING,
        settings="\n".join(fields),
    )


def _rows(before: Scores, after: Scores) -> list[list[str]]:
    return [
        [
            name,
            *(", ".join(f"{100 * share:.0f}" for share in shares) for shares in (found.match, found.overlap)),
            f"{found.length:.2f}",
            ", ".join(f"{length:.2f}" for length in found.sampled_lengths.values()),
        ]
        for name, found in (("as it began", before), ("trained", after))
    ]


def _quoted(config: dict[str, Any]) -> str:
    return shlex.quote(json.dumps(config))
