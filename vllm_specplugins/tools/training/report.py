"""What a training found: tables on the terminal, and a model card beside the weights."""

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specplugins.tools.report import say, serve_with, show_table, stdout, table_of
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.scores import Scores

MOST_PLACES = 4  # of a draft that are shown
MOST_FILES = 20  # that a card names
# A step with drafts in one without, on an H100 with one request: 1.26 with a jump, 1.49 with an exit.
LITTLE, ENOUGH = 1.1, 1.5
RIGHT = "How often a draft token is right, if those before it are, %"
LENGTHS = "Tokens a step: an engine's acceptance length"
MEANING = (
    "T: temperature. On what the model writes after the beginnings of held-out rows. At T 0 a draft token is right if "
    "it is the model's; at T 1 its chance is the sum of min(p, q), that of probabilistic drafts. Greedy, coupled and "
    "probabilistic are values of draft_sample_method."
)
CARD = """\
# {method} for {model}

A small part that drafts for speculative decoding on the states of {model},
which stays as it is. To serve with it, with vllm-specplugins installed:

    vllm serve {model} --speculative-config {config}

{verdict}

## Scores, on {num_tokens:,} tokens

{tables}

{meaning}

## How it was trained

{data}
{settings}

The weights were made from those of {model} and from the text: their licences bind it.
"""
Rows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Trained:
    """A training and its scores.

    Args:
        before: of the part as it began.
        after: of what was saved.
        config: value for vLLM.
        num_tokens: that were scored.
        data: lines on the text, for the card.
    """

    before: Scores
    after: Scores
    config: dict[str, Any]
    settings: Settings
    num_tokens: int
    data: list[str]

    @property
    def verdict(self) -> str:
        """Whether it is worth serving with."""
        length = self.after.length
        if length <= self.before.length:
            return "It is no better than it began: train it for longer, or leave it out."
        words = f"At temperature 0 it has {length:.2f} tokens a step"
        if length < LITTLE:
            return f"{words}: it will not pay. Train it for longer, on text like what you serve, or leave it out."
        if length < ENOUGH:
            return (
                f"{words}, and a step with drafts may take 1.1 to 1.5 times as long: it hardly pays. Measure it: bench."
            )
        return f"{words}: it may pay. Measure it before you serve with it: bench."

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """A title, and rows of which the first is the head's."""
        states = (("as it began", self.before), ("trained", self.after))
        places = [f"{ordinal(place)} draft token" for place in range(1, 1 + min(MOST_PLACES, len(self.after.match)))]
        right = [
            [f"T {heat}, {name}", *(f"{100 * share:.0f}" for share in getattr(found, kind)[:MOST_PLACES])]
            for heat, kind in ((0, "match"), (1, "overlap"))
            for name, found in states
        ]
        yield RIGHT, [["", *places], *right]
        drawn = [f"T 1, {method}" for method in self.after.sampled_lengths]
        lengths = [
            [name, f"{found.length:.2f}", *(f"{length:.2f}" for length in found.sampled_lengths.values())]
            for name, found in states
        ]
        yield LENGTHS, [["", "T 0", *drawn], *lengths]


def ordinal(number: int) -> str:
    """Of a small number.

    >>> [ordinal(number) for number in (1, 2, 3, 4)]
    ['1st', '2nd', '3rd', '4th']
    """
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def show(found: Trained, out: Path) -> None:
    """Prints the scores, the verdict and what to serve with."""
    console = stdout()
    for title, (head, *rows) in found.tables():
        table = table_of(head[0], head[1:], title)
        for row in rows:
            table.add_row(*row)
        show_table(console, table)
    say(console, f"{MEANING} {found.num_tokens:,} tokens were scored.")
    say(console, f"\n{found.verdict}\nSaved in {out}. To serve with it:\n{serve_with(found.config)}")


def card(found: Trained) -> str:
    """The model card, in Markdown."""
    kept = {name: value for name, value in asdict(found.settings).items() if value is not None and name != "data"}
    return CARD.format(
        method=found.config["method"],
        model=found.settings.model,
        config=shlex.quote(json.dumps(found.config)),
        verdict=textwrap.fill(found.verdict, 100),
        num_tokens=found.num_tokens,
        tables="\n\n".join(f"{title}:\n\n{_markdown(rows)}" for title, rows in found.tables()),
        meaning=textwrap.fill(MEANING, 100),
        data="\n".join(f"* {line}" for line in found.data),
        settings="\n".join(f"* {name.replace('_', ' ')}: {value}" for name, value in kept.items()),
    )


def about_data(files: Sequence[Path], built_in: str, rows: Sequence[Sequence[int]], loss: float | None) -> list[str]:
    """Lines of a card: the files with their sizes, or what is built in, the tokens, and the loss at the end."""
    named = [f"{file} ({file.stat().st_size:,} bytes)" if file.is_file() else str(file) for file in files[:MOST_FILES]]
    more = [f"and {len(files) - MOST_FILES} more files"] * (len(files) > MOST_FILES)
    ended = [] if loss is None else [f"loss of the last step: {loss:.3f} nats a draft token"]
    sizes = f"trained on {len(rows):,} rows of {sum(map(len, rows)):,} tokens"
    return [f"text: {name}" for name in (named or [built_in])] + more + [sizes] + ended


def _markdown(rows: Rows) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
