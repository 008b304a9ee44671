"""`train-exit-head`, `train-jump` and others: a command for each part that can be trained, with the same core."""

import argparse
import json
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.files import every_nth, make_folder, save_whole, token_rows
from vllm_specplugins.tools.training.core import Settings, train
from vllm_specplugins.tools.training.exit_head import ExitHeadSettings
from vllm_specplugins.tools.training.jump import JumpSettings
from vllm_specplugins.tools.training.look_ahead import LookAheadSettings
from vllm_specplugins.tools.training.medusa import MedusaSettings
from vllm_specplugins.tools.training.parts import Part
from vllm_specplugins.tools.training.report import card, show
from vllm_specplugins.tools.training.scores import scores

PARTS: dict[str, type[Settings]] = {
    "train-exit-head": ExitHeadSettings,
    "train-jump": JumpSettings,
    "train-look-ahead": LookAheadSettings,
    "train-medusa": MedusaSettings,
}
MAX_SCORED_ROWS = 64
NUM_SCORED_TOKENS = 3  # K of the scores and of the printed configuration


def run(args: argparse.Namespace) -> int:
    """A command; prints its findings and returns the exit status."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu, not cuda: torch finds no GPU.")
    make_folder(args.out)
    rows = token_rows(args.data, load_tokenizer(args.model), args.row_tokens)
    if len(rows) < 2:
        raise ConfigError(f"--data must hold at least 2 rows of up to {args.row_tokens} tokens, not {len(rows)}.")
    heldout = set(every_nth(len(rows), max(1, round(len(rows) * args.heldout))))
    base = BaseModel.load(args.model, device)
    settings = _settings(args, base, zlib.crc32(json.dumps(rows).encode()))
    train_rows = [row for index, row in enumerate(rows) if index not in heldout]
    test_rows = [row for index, row in enumerate(rows) if index in heldout]
    test_rows = [test_rows[i] for i in every_nth(len(test_rows), MAX_SCORED_ROWS)]
    try:
        with _interrupts() as interrupts:
            part = _train_with_progress(base, train_rows, settings, args.out, lambda: bool(interrupts))
        parts = settings.begin(base, train_rows), part
        before, after = (scores(base, test_rows, part, NUM_SCORED_TOKENS) for part in parts)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"Interrupted. The training is saved in {args.out}: the same command goes on from there.",
            highlight=False,
            soft_wrap=True,
        )
        return 130
    except torch.OutOfMemoryError:
        raise ConfigError("--batch-tokens and --row-tokens must be smaller: the GPU's memory is full.") from None
    config = part.serving(args.out)
    config.setdefault("num_speculative_tokens", NUM_SCORED_TOKENS)
    num_tokens = sum(map(len, test_rows))
    words = card(before, after, config, settings, num_tokens)
    save_whole(args.out, lambda folder: _write(folder / "README.md", words))
    show(before, after, config, args.out, num_tokens)
    return 0


def _settings(args: argparse.Namespace, base: BaseModel, data: int) -> Settings:
    """What was asked for; ConfigError for a size that the model does not have."""
    kind = PARTS[args.command]
    values = {entry.name: getattr(args, entry.name) for entry in fields(kind) if hasattr(args, entry.name)}
    if values.get("late_layer", 0) is None:
        values["late_layer"] = base.num_layers - 1
    settings = kind(**{**values, "data": data})
    settings.check(base)
    return settings


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that come meanwhile: the first is noted, that a step may end; the next is as ever."""
    found: list[int] = []

    def note(number: int, frame: Any) -> None:
        found.append(number)
        signal.signal(number, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def _train_with_progress(
    base: BaseModel, rows: Sequence[Sequence[int]], settings: Settings, out: Path, interrupted: Callable[[], bool]
) -> Part:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=settings.steps)

        def advance(step: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"training, loss {loss:.3f}")

        return train(base, rows, settings, out, advance, interrupted)


def _write(path: Path, words: str) -> None:
    path.write_text(words)
