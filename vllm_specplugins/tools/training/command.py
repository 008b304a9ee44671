"""The commands that train parts: one for each kind, with the same core."""

import argparse
import json
import sys
import zlib
from dataclasses import fields
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.structures.whole_file import BEGUN
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.library import is_held_out, library_files
from vllm_specplugins.tools.data import rows_of, token_rows
from vllm_specplugins.tools.files import every_nth, make_folder, save_whole
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.training.core import STATE_FILE, Settings, train
from vllm_specplugins.tools.training.kinds import KINDS
from vllm_specplugins.tools.training.report import Trained, card, show_all
from vllm_specplugins.tools.training.scores import own_texts, scores

MAX_SCORED_ROWS = 64
NUM_SCORED_TOKENS = 3  # K of the scores and of the printed configuration, where the part does not fix it
BUILT_IN_FILES = 300  # of the standard library


def run(args: argparse.Namespace) -> int:
    """A command; prints its findings and returns the exit status."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu, not cuda: torch finds no GPU.")
    _check_out(make_folder(args.out))
    with progress() as bars:
        rows = _rows(args, bars)
        heldout = set(every_nth(len(rows), max(1, round(len(rows) * args.heldout))))
        base = BaseModel.load(args.model, device)
        settings = _settings(args, base, zlib.crc32(json.dumps(rows).encode()))
        train_rows, test_rows = (
            [row for i, row in enumerate(rows) if (i in heldout) == held] for held in (False, True)
        )
        try:
            found = _trained(base, train_rows, test_rows, settings, args, bars)
        except KeyboardInterrupt:
            words = f"The training is saved in {args.out} once a minute: the same command goes on from there."
            sys.stderr.write(f"Interrupted. {words}\n")
            return 130
        except torch.OutOfMemoryError:
            raise ConfigError("--batch-tokens and --row-tokens must be smaller: the GPU's memory is full.") from None
    text = card(found).encode(errors="backslashreplace")
    save_whole(args.out, lambda folder: (folder / "README.md").write_bytes(text))
    show_all(found, args.out)
    return 0


def _check_out(folder: Path) -> None:
    """ConfigError for a folder with files of something else, which those of the part would replace."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(BEGUN)}
    if names and STATE_FILE not in names:
        raise ConfigError(f"--out must be a new or empty folder, or one of an earlier run, not {folder}.")


def _trained(
    base: BaseModel, rows: list[list[int]], test_rows: list[list[int]], settings: Settings, args: Any, bars: Progress
) -> Trained:
    task = bars.add_task("training", total=settings.steps)
    losses: list[float] = []

    def advance(step: int, loss: float) -> None:
        losses[:] = [loss]
        bars.update(task, completed=step, description=f"training, loss {loss:.3f}")

    part = train(base, rows, settings, args.out, advance)
    config = settings.serving(args.out)
    config.setdefault("num_speculative_tokens", NUM_SCORED_TOKENS)
    bars.add_task("writing text to score on, and scoring", total=None)
    some = [test_rows[i] for i in every_nth(len(test_rows), MAX_SCORED_ROWS)]
    greedy, sampled = (own_texts(base, some, temperature) for temperature in (0.0, 1.0))
    before, after = (
        scores(base, greedy, sampled, settings.guesser(base, own), config["num_speculative_tokens"])
        for own in (settings.begin(base, rows), part)
    )
    num_tokens = sum(len(text.row) - text.begin for text in (*greedy, *sampled))
    files = ", ".join(map(str, args.data)) or f"{BUILT_IN_FILES} files of Python's standard library"
    data = [f"text: {shorten(files, 1000)}", f"trained on {len(rows):,} rows of {sum(map(len, rows)):,} tokens"]
    data += [f"loss of the last step: {loss:.3f} nats a draft token" for loss in losses]
    return Trained(before, after, config, settings, num_tokens, data)


def _rows(args: argparse.Namespace, bars: Progress) -> list[list[int]]:
    """The text to train and to score on; ConfigError if there is none, or too little."""
    tokenizer = load_tokenizer(args.model)
    reading = bars.add_task("reading text", total=None)
    if args.data:
        rows = token_rows(args.data, tokenizer, args.row_tokens)
    else:  # the standard library, without what `bench` asks
        texts = [text for source, text in library_files() if not is_held_out(source)]
        texts = [texts[index] for index in every_nth(len(texts), BUILT_IN_FILES)]
        rows = rows_of(texts, tokenizer, args.row_tokens)
    bars.remove_task(reading)
    if len(rows) < 2:
        raise ConfigError(f"--data must hold at least 2 rows of up to {args.row_tokens} tokens, not {len(rows)}.")
    return rows


def _settings(args: argparse.Namespace, base: BaseModel, data: int) -> Settings:
    """What was asked for; ConfigError for a size that the model does not have."""
    kind = KINDS[args.command]
    values = {entry.name: getattr(args, entry.name) for entry in fields(kind) if hasattr(args, entry.name)}
    for name, default in (("late_layer", base.num_layers), ("inner_size", 4 * base.hidden_size)):
        if name in values and values[name] is None:
            values[name] = default
    settings = kind(**{**values, "data": data})
    settings.check(base)
    return settings
