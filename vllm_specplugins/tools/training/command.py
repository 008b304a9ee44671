"""Implements the commands that train a part and score it."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.progress import Progress

from vllm_specplugins.config import ConfigError, EarlyExitConfig
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.data import token_rows
from vllm_specplugins.tools.files import every_nth, make_folder
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import say, serve_with, show_table
from vllm_specplugins.tools.training.core import Settings, train
from vllm_specplugins.tools.training.kinds import KINDS
from vllm_specplugins.tools.training.scores import Scores, scores, write_texts

MAX_SCORED_ROWS = 64
NUM_SCORED_TOKENS = 3  # K of the scores and of the printed configuration, unless the part sets it
MAX_PLACES = 4  # maximum number of positions of a draft in the table
# On an H100 with one request, a step with drafts takes 1.26 times as long with a jump, and 1.49 times with an exit.
LITTLE, ENOUGH = 1.1, 1.5
MEANING = (
    "T: temperature. The text is the model's continuation of held-out rows. At T 0 a draft token is correct if it is "
    "the model's token. At T 1 the figure is the acceptance probability of the draft_sample_method greedy, coupled or "
    "probabilistic (the sum of min(p, q))."
)


@dataclass(frozen=True, slots=True)
class Trained:
    before: Scores  # scores of the part before training
    after: Scores  # scores of the saved part
    config: dict[str, Any]  # value for vLLM
    num_tokens: int  # that were scored

    @property
    def verdict(self) -> str:
        length = self.after.length
        if length <= self.before.length:
            return "Training did not improve the part: train it longer, or do not use it."
        words = f"At temperature 0 the part emits {length:.2f} tokens per step"
        if length < LITTLE:
            return f"{words}, too few to pay off. Train it longer, on text like your traffic, or do not use it."
        cost = ", but a step with drafts may take 1.1 to 1.5 times as long: it hardly pays off" * (length < ENOUGH)
        return f"{words}{cost or ': it may pay off'}. Measure it with `bench` before you serve it."


def run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu, not cuda: torch finds no GPU.")
    if any(make_folder(args.out).iterdir()):  # a part would replace these files
        raise ConfigError(f"--out must be a new or empty folder, not {args.out}.")
    with progress() as bars:
        rows = _rows(args, bars)
        heldout = set(every_nth(len(rows), max(1, round(len(rows) * args.heldout))))
        base = BaseModel.load(args.model, device)
        settings = _settings(args, base)
        train_rows, test_rows = (
            [row for i, row in enumerate(rows) if (i in heldout) == held] for held in (False, True)
        )
        try:
            trained = _trained(base, train_rows, test_rows, settings, args, bars)
        except torch.OutOfMemoryError:
            raise ConfigError("--batch-tokens and --row-tokens must be smaller: the GPU's memory is full.") from None
    show(trained)
    say(f"Saved in {args.out}. To serve with it:\n{serve_with(trained.config)}")
    return 0


def _rows(args: argparse.Namespace, bars: Progress) -> list[list[int]]:
    reading = bars.add_task("reading text", total=None)
    rows = token_rows(args.dataset_path, load_tokenizer(args.model), args.row_tokens)
    bars.remove_task(reading)
    if len(rows) < 2:
        raise ConfigError(
            f"--dataset-path must have at least 2 rows of up to {args.row_tokens} tokens, not {len(rows)}."
        )
    return rows


def _settings(args: argparse.Namespace, base: BaseModel) -> Settings:
    kind = KINDS[args.command]
    values = {entry.name: getattr(args, entry.name) for entry in fields(kind) if hasattr(args, entry.name)}
    if "layers" in values:
        if (args.layers is None) == (args.exit_layer is None):
            raise ConfigError("--exit-layer or --layers must be given.")
        if args.layers is not None:
            exit_config = EarlyExitConfig(layers=args.layers)
            values |= {"exit_layer": exit_config.exit_layer, "layers": exit_config.layers}
    for name, default in (("late_layer", base.num_layers), ("inner_size", 4 * base.hidden_size)):
        if name in values and values[name] is None:
            values[name] = default
    settings = kind(**values)
    settings.check(base)
    return settings


def _trained(
    base: BaseModel, rows: list[list[int]], test_rows: list[list[int]], settings: Settings, args: Any, bars: Progress
) -> Trained:
    task = bars.add_task("training", total=settings.steps)

    def advance(step: int, loss: float) -> None:
        bars.update(task, completed=step, description=f"training, loss {loss:.3f}")

    part = train(base, rows, settings, args.out, advance)
    config = settings.serving(args.out)
    config.setdefault("num_speculative_tokens", NUM_SCORED_TOKENS)
    bars.add_task("writing text to score on, and scoring", total=None)
    some = [test_rows[i] for i in every_nth(len(test_rows), MAX_SCORED_ROWS)]
    greedy, sampled = (write_texts(base, some, temperature) for temperature in (0.0, 1.0))
    before, after = (
        scores(base, greedy, sampled, settings.guesser(base, its), config["num_speculative_tokens"])
        for its in (settings.begin(base, rows), part)
    )
    return Trained(before, after, config, sum(len(text.row) - text.begin for text in (*greedy, *sampled)))


def show(trained: Trained) -> None:
    states = (("as it began", trained.before), ("trained", trained.after))
    right = [
        [f"T {heat}, {name}", *(f"{100 * share:.0f}" for share in getattr(its, kind)[:MAX_PLACES])]
        for heat, kind in ((0, "match"), (1, "overlap")) for name, its in states
    ]  # fmt: skip
    lengths = [
        [name, *(f"{length:.2f}" for length in (its.length, *its.sampled_lengths.values()))] for name, its in states
    ]
    say("Share of draft tokens that are correct if all earlier ones are, %")
    show_table([str(place) for place in range(1, len(right[0]))], {"": right}, "draft token")
    say("Tokens per step: an engine's mean acceptance length")
    show_table(["T 0", *(f"T 1, {method}" for method in trained.after.sampled_lengths)], {"": lengths})
    say(f"{MEANING} {trained.num_tokens:,} tokens were scored.\n\n{trained.verdict}")
