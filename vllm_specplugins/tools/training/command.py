"""`train-exit-head`, `train-jump` and others: a command for each part that can be trained, with the same core."""

import argparse
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.library import is_held_out, library_files
from vllm_specplugins.tools.data import rows_of, token_rows
from vllm_specplugins.tools.files import every_nth, make_folder, save_whole
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.training.core import Settings, train
from vllm_specplugins.tools.training.exit_head import ExitHeadSettings
from vllm_specplugins.tools.training.jump import JumpSettings
from vllm_specplugins.tools.training.look_ahead import LookAheadSettings
from vllm_specplugins.tools.training.own_text import own_rows
from vllm_specplugins.tools.training.parts import Part
from vllm_specplugins.tools.training.report import Trained, about_data, card, show
from vllm_specplugins.tools.training.scores import Scores, own_texts, scores

PARTS: dict[str, type[Settings]] = {
    "train-exit-head": ExitHeadSettings,
    "train-jump": JumpSettings,
    "train-look-ahead": LookAheadSettings,
}
MAX_SCORED_ROWS = 64
NUM_SCORED_TOKENS = 3  # K of the scores and of the printed configuration, where the part does not fix it
BUILT_IN_FILES = 300  # of the standard library


def run(args: argparse.Namespace) -> int:
    """A command; prints its findings and returns the exit status."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu, not cuda: torch finds no GPU.")
    make_folder(args.out)
    with progress() as bars:
        found = _trained(args, device, bars)
    if found is None:
        return 130
    save_whole(args.out, lambda folder: _write(folder / "README.md", card(found)))
    show(found, args.out)
    return 0


def _trained(args: argparse.Namespace, device: str, bars: Progress) -> Trained | None:
    """None if it was interrupted."""
    rows = _rows(args, bars)
    heldout = set(every_nth(len(rows), max(1, round(len(rows) * args.heldout))))
    base = BaseModel.load(args.model, device)
    settings = _settings(args, base, zlib.crc32(json.dumps(rows).encode()))
    train_rows = [row for index, row in enumerate(rows) if index not in heldout]
    test_rows = [row for index, row in enumerate(rows) if index in heldout]
    test_rows = [test_rows[i] for i in every_nth(len(test_rows), MAX_SCORED_ROWS)]
    try:
        part, loss = _train(base, train_rows, settings, args.out, bars)
        config = part.serving(args.out)
        config.setdefault("num_speculative_tokens", NUM_SCORED_TOKENS)
        num_draft = config["num_speculative_tokens"]
        before, after, num_tokens = _scored(base, test_rows, (settings.begin(base, train_rows), part), num_draft, bars)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"Interrupted. The training is saved in {args.out} once a minute: the same command goes on from there.",
            highlight=False,
            soft_wrap=True,
        )
        return None
    except torch.OutOfMemoryError:
        raise ConfigError("--batch-tokens and --row-tokens must be smaller: the GPU's memory is full.") from None
    built_in = f"{BUILT_IN_FILES} files of Python's standard library"
    return Trained(before, after, config, settings, num_tokens, about_data(args.data, built_in, train_rows, loss))


def _rows(args: argparse.Namespace, bars: Progress) -> list[list[int]]:
    """The text to train and to score on; with --self it is sampled here, or read where it was before.

    Raises:
        ConfigError: there is no text, or too little; see own_rows.
    """
    tokenizer = load_tokenizer(args.model)
    reading = bars.add_task("reading text", total=None)
    rows = token_rows(args.data, tokenizer, args.row_tokens) if args.data else _built_in(tokenizer, args.row_tokens)
    bars.remove_task(reading)
    if len(rows) < 2:
        raise ConfigError(f"--data must hold at least 2 rows of up to {args.row_tokens} tokens, not {len(rows)}.")
    if args.own_text is None:
        return rows
    batch_rows = max(1, args.batch_tokens // args.row_tokens)
    wanted = math.ceil(args.steps * batch_rows / (1 - args.heldout)) + 2  # no step needs more
    rows = [rows[index] for index in every_nth(len(rows), wanted)]
    task = bars.add_task("sampling text", total=len(rows))
    return own_rows(
        args.model, rows, args.row_tokens, args.own_text, args.seed, args.out,
        lambda count: bars.update(task, completed=count),
    )  # fmt: skip


def _built_in(tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """Rows of the standard library, without what `bench` asks."""
    texts = [text for source, text in library_files() if not is_held_out(source)]
    return rows_of([texts[index] for index in every_nth(len(texts), BUILT_IN_FILES)], tokenizer, row_tokens)


def _settings(args: argparse.Namespace, base: BaseModel, data: int) -> Settings:
    """What was asked for; ConfigError for a size that the model does not have."""
    kind = PARTS[args.command]
    values = {entry.name: getattr(args, entry.name) for entry in fields(kind) if hasattr(args, entry.name)}
    if values.get("late_layer", 0) is None:
        values["late_layer"] = base.num_layers
    if values.get("inner_size", 0) is None:
        values["inner_size"] = 4 * base.hidden_size
    settings = kind(**{**values, "data": data})
    settings.check(base)
    return settings


def _train(
    base: BaseModel, rows: Sequence[Sequence[int]], settings: Settings, out: Path, bars: Progress
) -> tuple[Part, float | None]:
    """The part, and the loss of its last step, if this run has made one."""
    task = bars.add_task("training", total=settings.steps)
    losses: list[float] = []

    def advance(step: int, loss: float) -> None:
        losses[:] = [loss]
        bars.update(task, completed=step, description=f"training, loss {loss:.3f}")

    part = train(base, rows, settings, out, advance)
    return part, next(iter(losses), None)


def _scored(
    base: BaseModel, rows: Sequence[Sequence[int]], parts: Sequence[Part], num_draft: int, bars: Progress
) -> tuple[Scores, Scores, int]:
    """How a part did before its training and after, and on how many tokens of the model's own."""
    texts = []
    for temperature in (0.0, 1.0):
        task = bars.add_task(f"writing text to score on, at temperature {temperature:g}, tokens of each of {len(rows)}")
        texts.append(
            own_texts(
                base, rows, temperature, lambda done, all, task=task: bars.update(task, completed=done, total=all)
            )
        )
    task = bars.add_task("scoring", total=len(parts) * sum(map(len, texts)))
    before, after = (scores(base, *texts, part, num_draft, lambda: bars.advance(task)) for part in parts)
    return before, after, sum(len(text.row) - text.begin for text in (*texts[0], *texts[1]))


def _write(path: Path, words: str) -> None:
    path.write_text(words)
