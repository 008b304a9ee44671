"""What a training found: tables on the terminal, and the same in a model card beside the weights."""

import io
import json
import shlex
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_specplugins.tools.report import WIDTH, say, serve_with, show_table, stdout, table_of
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.scores import Scores

MOST_PLACES = 4  # of a draft that are shown
# A step with drafts in one without, on an H100 with one request: 1.26 with a jump, 1.49 with an exit.
LITTLE, ENOUGH = 1.1, 1.5
RIGHT = "How often a draft token is right, if those before it are, %"
LENGTHS = "Tokens a step: an engine's acceptance length"
MEANING = (
    "T: temperature. On what the model writes after the beginnings of held-out rows. At T 0 a draft token is right if "
    "it is the model's; at T 1 it is accepted with the sum of min(p, q), that of probabilistic drafts. Greedy, coupled "
    "and probabilistic are values of draft_sample_method."
)
CARD = """\
# {method} for {model}

A small part that drafts for speculative decoding on the states of {model},
which stays as it is. To serve with it, with vllm-specplugins installed:

    vllm serve {model} --speculative-config {config}

```
{scores}
```

## How it was trained

{trained}

The weights were made from those of {model} and from the text: their licences bind it.
"""


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
        cost = ", and a step with drafts may take 1.1 to 1.5 times as long: it hardly pays" * (length < ENOUGH)
        return f"{words}{cost or ': it may pay'}. Measure it before you serve with it: bench."


def show(found: Trained, console: Console) -> None:
    """Prints the scores and the verdict."""
    states = (("as it began", found.before), ("trained", found.after))
    places = range(1, 1 + min(MOST_PLACES, len(found.after.match)))
    table = table_of("draft token", map(str, places))
    say(console, RIGHT)
    for heat, kind in ((0, "match"), (1, "overlap")):
        for name, scores in states:
            table.add_row(f"T {heat}, {name}", *(f"{100 * share:.0f}" for share in getattr(scores, kind)[:MOST_PLACES]))
    show_table(console, table)
    table = table_of("", ["T 0", *(f"T 1, {method}" for method in found.after.sampled_lengths)])
    say(console, LENGTHS)
    for name, scores in states:
        table.add_row(name, *(f"{length:.2f}" for length in (scores.length, *scores.sampled_lengths.values())))
    show_table(console, table)
    say(console, f"{MEANING} {found.num_tokens:,} tokens were scored.\n\n{found.verdict}")


def show_all(found: Trained, out: Path) -> None:
    """The same on the terminal, and what to serve with."""
    show(found, stdout())
    say(stdout(), f"Saved in {out}. To serve with it:\n{serve_with(found.config)}")


def card(found: Trained) -> str:
    """The model card, in Markdown."""
    text = io.StringIO()
    show(found, Console(file=text, width=WIDTH))
    kept = {name: value for name, value in asdict(found.settings).items() if value is not None and name != "data"}
    lines = [*found.data, *(f"{name.replace('_', ' ')}: {value}" for name, value in kept.items())]
    return CARD.format(
        method=found.config["method"],
        model=found.settings.model,
        config=shlex.quote(json.dumps(found.config)),
        scores=textwrap.dedent(text.getvalue()).rstrip(),
        trained="\n".join(f"* {line}" for line in lines),
    )
