"""`train-exit-head`: teaches a norm and a head to read an early layer as the whole model reads its last one.

Distillation: cross-entropy against the full model's own distribution at the same token (Hinton et al. 2015); the
model stays as it is. A step's rows follow from its number alone, so that a run that was killed goes on as if it had
not been. T: tokens, H: hidden size, V: vocabulary, R: rank.
"""

import argparse
import json
import shlex
import signal
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_specplugins.config import ConfigError, shown
from vllm_specplugins.proposers.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.tools.base_model import BaseModel, Exit, load_tokenizer, overlap
from vllm_specplugins.tools.files import every_nth, make_folder, save_whole, token_rows

STATE_FILE = "training_state.pt"
SAVE_SECONDS = 60.0
WARM_UP = 0.05  # of the steps
MAX_SCORED_ROWS = 64
NUM_SPECULATIVE_TOKENS = 3  # of the printed configuration; `calibrate` finds the best one


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides the weights of a run; a run can only be resumed with the same.

    Args:
        model: path or name.
        exit_layer: how many layers run before the head.
        rank: R, 0 is one full matrix.
        steps: optimizer steps.
        batch_tokens: about so many tokens a step.
        row_tokens: most tokens of a row.
        learning_rate: of AdamW, at its highest.
        seed: of the order of the rows.
        heldout: share of the rows that is not trained on.
        data: checksum of the token ids.
    """

    model: str
    exit_layer: int
    rank: int
    steps: int
    batch_tokens: int
    row_tokens: int
    learning_rate: float
    seed: int
    heldout: float
    data: int

    @property
    def batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.row_tokens)


@dataclass(frozen=True, slots=True)
class Scores:
    """Over held-out tokens: share of equal greedy choices, and mean sum of min(p, q)."""

    match: float
    overlap: float


def run(args: argparse.Namespace) -> int:
    """The command; prints its findings and returns the exit status."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu, not cuda: torch finds no GPU.")
    make_folder(args.out)
    rows = token_rows(args.data, load_tokenizer(args.model), args.row_tokens)
    if len(rows) < 2:
        raise ConfigError(f"--data must hold at least 2 rows of up to {args.row_tokens} tokens, not {len(rows)}.")
    heldout = set(every_nth(len(rows), max(1, round(len(rows) * args.heldout))))
    names = ("model", "exit_layer", "rank", "steps", "batch_tokens", "row_tokens", "learning_rate", "seed", "heldout")
    settings = Settings(**{name: getattr(args, name) for name in names}, data=zlib.crc32(json.dumps(rows).encode()))
    base = BaseModel.load(args.model, device)
    check_sizes(settings, base)
    train_rows = [row for index, row in enumerate(rows) if index not in heldout]
    test_rows = [row for index, row in enumerate(rows) if index in heldout]
    try:
        with _interrupts() as interrupts:
            head = _train_with_progress(base, train_rows, settings, args.out, lambda: bool(interrupts))
        test_rows = [test_rows[i] for i in every_nth(len(test_rows), MAX_SCORED_ROWS)]
        before, after = scores(base, test_rows, [Exit(settings.exit_layer), Exit(settings.exit_layer, head)])
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"Interrupted. The training is saved in {args.out}: the same command goes on from there.",
            highlight=False,
            soft_wrap=True,
        )
        return 130
    except torch.OutOfMemoryError:
        raise ConfigError("--batch-tokens and --row-tokens must be smaller: the GPU's memory is full.") from None
    _report(before, after, settings, args.out, sum(map(len, test_rows)))
    return 0


def check_sizes(settings: Settings, base: BaseModel) -> None:
    """Raises ConfigError for a layer or a rank that the model does not have."""
    allowed = {"exit_layer": (1, base.num_layers - 1), "rank": (0, min(base.head_weight.shape))}
    for name, (low, high) in allowed.items():
        if not low <= (value := getattr(settings, name)) <= high:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be an integer from {low} to {high} for this model, not {value}.")


def train(
    base: BaseModel,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    advance: Callable[[int, float], None] = lambda step, loss: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> ExitHead:
    """Trains a head and saves it in `out`, in the model's dtype; goes on where a run in `out` stopped.

    Args:
        base: the model.
        rows: token ids to train on.
        settings: see Settings.
        out: folder of the head and of the state of its training.
        advance: called after each step with the number of steps done and the loss, in nats a token.
        interrupted: asked after each step; the run is saved and ends there if so.

    Raises:
        ConfigError: `out` holds a run with other settings, or cannot be written.
        KeyboardInterrupt: the run was interrupted, and is saved.
    """
    head = initial_head(base, settings)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in head.weights.items()}
    head = ExitHead(head.config, parameters)
    optimizer = torch.optim.AdamW(parameters.values(), betas=(0.9, 0.95), weight_decay=0.0)
    first = _resume(out / STATE_FILE, settings, parameters, optimizer)
    saved = time.monotonic()
    for step in range(first, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule(step, settings.steps)
        picked = rows_of_step(step, len(rows), settings.batch_rows, settings.seed)
        loss = distil(base, head, [rows[index] for index in picked])
        optimizer.step()
        optimizer.zero_grad()
        ends = interrupted() or step + 1 == settings.steps
        if ends or time.monotonic() - saved > SAVE_SECONDS:
            _save_state(out / STATE_FILE, settings, parameters, optimizer, step + 1)
            saved = time.monotonic()
        advance(step + 1, loss)
        if ends and step + 1 < settings.steps:
            raise KeyboardInterrupt
    weights = {name: tensor.detach().to(base.dtype) for name, tensor in parameters.items()}
    save_whole(out, ExitHead(head.config, weights).save)
    # What is scored is what was saved.
    return ExitHead(head.config, {name: tensor.float() for name, tensor in weights.items()})


def initial_head(base: BaseModel, settings: Settings) -> ExitHead:
    """The model's own norm and head, in float32; with a rank, the nearest matrix of that rank (Eckart, Young 1936)."""
    weight = base.head_weight.float()
    config = ExitHeadConfig(
        exit_layer=settings.exit_layer,
        hidden_size=base.hidden_size,
        vocab_size=len(weight),
        rank=settings.rank,
        rms_norm_eps=base.norm_eps,
    )
    weights = {"norm.weight": base.norm_weight.clone()}
    if settings.rank == 0:
        return ExitHead(config, {**weights, "head.weight": weight.clone()})
    # [H, R]: the directions in which the head's rows are longest; cheaper than an SVD of [V, H].
    directions = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -settings.rank :]
    return ExitHead(config, {**weights, "down.weight": directions.T.contiguous(), "up.weight": weight @ directions})


def distil(base: BaseModel, head: ExitHead, rows: Sequence[Sequence[int]]) -> float:
    """Adds the gradient of the mean cross-entropy of some rows to the head's; returns it, in nats a token."""
    num_tokens = sum(map(len, rows))
    total = 0.0
    # A row at a time: logits [T, V] are the largest thing here.
    for states in base.hidden_states(rows):
        target = base.logits(states[-1]).softmax(-1)
        logits = head.logits(states[head.config.exit_layer - 1].float())
        loss = F.cross_entropy(logits, target, reduction="sum") / num_tokens
        loss.backward()
        total += loss.item()
    return total


def schedule(step: int, steps: int) -> float:
    """The learning rate's share of its highest: up over WARM_UP of the steps, then down to nothing."""
    return min(1.0, (step + 1) / (WARM_UP * steps + 1)) * (1 - step / steps)


def rows_of_step(step: int, num_rows: int, batch_rows: int, seed: int) -> list[int]:
    """The rows of a step: each row once an epoch, in an order of that epoch's own."""
    picked: list[int] = []
    orders: dict[int, torch.Tensor] = {}
    for index in range(step * batch_rows, (step + 1) * batch_rows):
        epoch, place = divmod(index, num_rows)
        if epoch not in orders:
            orders[epoch] = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        picked.append(int(orders[epoch][place]))
    return picked


def scores(base: BaseModel, rows: Sequence[Sequence[int]], exits: Sequence[Exit]) -> list[Scores]:
    """How well each exit agrees with the full model, over all tokens of some rows."""
    totals = torch.zeros(len(exits), 2, dtype=torch.float64)
    for row in rows:
        [states] = base.hidden_states([row])
        full = base.logits(states[-1])
        for total, place in zip(totals, exits, strict=True):
            logits = place.logits(base, states)
            total[0] += (logits.argmax(-1) == full.argmax(-1)).sum().item()
            total[1] += overlap(full, logits).sum().item()
    return [Scores(*values) for values in (totals / sum(map(len, rows))).tolist()]


def _resume(path: Path, settings: Settings, parameters: dict[str, Any], optimizer: Any) -> int:
    """Loads the state at `path`, if there is one; returns the number of steps that it has done."""
    if not path.exists():
        return 0
    whole = ConfigError(f"--out must be a folder whose {STATE_FILE} is whole, not {path.parent}.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load looks at no checksum
            if archive.testzip() is not None:
                raise whole
        state = torch.load(path, weights_only=True, map_location=parameters["norm.weight"].device)
        stored, step = dict(state["settings"]), state["step"]
        differing = [name for name, value in asdict(settings).items() if stored.get(name) != value]
    except Exception as error:
        raise whole from error
    if differing:
        name = differing[0]
        flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        found = "other text" if name == "data" else shown(getattr(settings, name))
        was = "the text" if name == "data" else shown(stored.get(name))
        raise ConfigError(f"{flag} must be {was}, as in the run in {path.parent}, or --out new, not {found}.")
    try:
        if not 0 <= step <= settings.steps or type(step) is not int:
            raise whole
        _restore(state, parameters, optimizer)
    except Exception as error:
        raise whole from error
    return step


@torch.no_grad()
def _restore(state: dict[str, Any], parameters: dict[str, Any], optimizer: Any) -> None:
    """Raises whatever it may where the state is another's."""
    for name, tensor in parameters.items():
        found = state["weights"][name]
        if found.shape != tensor.shape:
            raise ValueError(f"{name} has the shape {tuple(found.shape)}")
        tensor.copy_(found)
    optimizer.load_state_dict(state["optimizer"])


def _save_state(path: Path, settings: Settings, parameters: dict[str, Any], optimizer: Any, step: int) -> None:
    """Writes the state of a run; a reader finds the old one or the new one, never a part."""
    state = {"settings": asdict(settings), "step": step, "optimizer": optimizer.state_dict()}
    state["weights"] = {name: tensor.data for name, tensor in parameters.items()}
    save_whole(path.parent, lambda folder: torch.save(state, folder / path.name))


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
) -> ExitHead:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=settings.steps)

        def advance(step: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"training, loss {loss:.3f}")

        return train(base, rows, settings, out, advance, interrupted)


def _report(before: Scores, after: Scores, settings: Settings, out: Path, num_tokens: int) -> None:
    console = Console()
    title = f"After layer {settings.exit_layer}, on {num_tokens:,} held-out tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("", "same token", "min(p, q)"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, found in (("the model's own norm and head", before), ("the trained head", after)):
        table.add_row(name, f"{found.match:.1%}", f"{found.overlap:.1%}")
    console.print(table)
    if after.match <= before.match:
        console.print("The trained head is no better than the model's own: train it for longer, or leave it out.")
    config = {
        "method": "early_exit",
        "exit_layer": settings.exit_layer,
        "exit_head": str(out.resolve()),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    console.print("same token: as the full model's, greedily. min(p, q): accepted at temperature 1.", highlight=False)
    console.print(
        f"Saved in {out}; `calibrate` tells what it gains. To serve with it:", highlight=False, soft_wrap=True
    )
    console.print(f"--speculative-config {shlex.quote(json.dumps(config))}", highlight=False, soft_wrap=True)
