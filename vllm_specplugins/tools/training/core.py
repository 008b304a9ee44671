"""The training of all parts: a part learns to predict the model's distribution (proposers/learning/distillation.py).
The rows of a step follow from its number alone, so that a killed run resumes as if it had not stopped."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.proposers.heads.trained import TrainedPart
from vllm_specplugins.proposers.learning.distillation import Guesser, distil
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import save_whole

STATE_FILE = "training_state.pt"
SAVE_SECONDS = 60.0
WARM_UP = 0.05  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that decide the weights of a run; a run resumes only with the same. Each kind of part adds fields."""

    model: str  # path or name
    steps: int
    batch_tokens: int  # of a step, about
    row_tokens: int  # of a row, at most
    learning_rate: float  # at its highest
    seed: int  # of the order of the rows
    heldout: float  # share of the rows that is not trained on
    data: int  # checksum of the token ids
    num_draft: int = 1  # how many draft tokens it learns to predict, one after the other

    @property
    def batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.row_tokens)

    @abstractmethod
    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """Limits of the part's fields for a model."""

    @abstractmethod
    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> TrainedPart:
        """The part before its training, in float32; it may look at some rows."""

    @abstractmethod
    def guesser(self, base: BaseModel, part: Any) -> Guesser:
        """The drafter of the part, as it is served, on all of a row at once."""

    @abstractmethod
    def serving(self, folder: Path) -> dict[str, Any]:
        """The value of --speculative-config."""

    def check(self, base: BaseModel) -> None:
        """Raises ConfigError for a field that the model does not allow."""
        for name, (low, high) in self.allowed(base).items():
            if not low <= (value := getattr(self, name)) <= high:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be an integer from {low} to {high} for this model, not {value}.")


def train(
    base: BaseModel,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    advance: Callable[[int, float], None] = lambda step, loss: None,
) -> TrainedPart:
    """Trains a part on rows of token ids and saves it in `out`, in the model's dtype; resumes a run that stopped there.
    `advance` is called with the number of steps done and the loss, in nats a draft token. Raises ConfigError: `out`
    holds a run with other settings, or cannot be written."""
    part = settings.begin(base, rows)
    part.requires_grad_()
    optimizer = torch.optim.AdamW(part.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    first, saved = resume(out / STATE_FILE, settings, part, optimizer), time.monotonic()
    guesser = settings.guesser(base, part)
    for step in range(first, settings.steps):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * schedule(step, settings.steps)
        texts = [rows[index] for index in rows_of_step(step, len(rows), settings.batch_rows, settings.seed)]
        loss = distil(base, base.hidden_states(texts), guesser, settings.num_draft, sum(map(len, texts)))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == settings.steps or time.monotonic() - saved > SAVE_SECONDS:
            state = {"settings": asdict(settings), "step": step + 1}
            state |= {"optimizer": optimizer.state_dict(), "weights": part.state_dict()}
            save_whole(out, partial(_save_state, state))
            saved = time.monotonic()
        advance(step + 1, loss)
    save_whole(out, lambda folder: part.save(folder, base.dtype))
    part.requires_grad_(False).to(base.dtype).float()  # for the scores, which are those of the saved part
    return part


def _save_state(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / STATE_FILE)


def schedule(step: int, steps: int) -> float:
    """Share of the highest learning rate: it rises over WARM_UP of the steps, then falls to nothing."""
    return min(1.0, (step + 1) / (WARM_UP * steps + 1)) * (1 - step / steps)


def rows_of_step(step: int, num_rows: int, batch_rows: int, seed: int) -> list[int]:
    """The rows of a step: each row once an epoch, in another order in each."""
    first, last = step * batch_rows, (step + 1) * batch_rows
    epochs = range(first // num_rows, (last - 1) // num_rows + 1)
    seeds = [torch.Generator().manual_seed(seed * 1_000_003 + epoch) for epoch in epochs]
    orders = torch.cat([torch.randperm(num_rows, generator=generator) for generator in seeds])
    picked: list[int] = orders[first - epochs[0] * num_rows :][: last - first].tolist()
    return picked


def resume(path: Path, settings: Settings, part: TrainedPart, optimizer: torch.optim.Optimizer) -> int:
    """Loads the state at `path`, if there is one; returns the number of steps that it has done."""
    if not path.exists():
        return 0
    try:
        state = torch.load(path, weights_only=True, map_location=next(part.parameters()).device)
        stored, step = dict(state["settings"]), state["step"]
        differing = [name for name, value in asdict(settings).items() if stored.get(name) != value]
        if not differing:
            if type(step) is not int or not 0 <= step <= settings.steps:
                raise ValueError("no step of this run")
            part.load_state_dict(state["weights"])
            optimizer.load_state_dict(state["optimizer"])
    except Exception as error:
        raise ConfigError(f"--out must be a folder with a whole {STATE_FILE}, not {path.parent}.") from error
    if differing:
        name = differing[0]
        flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        was, given = brief(stored.get(name)), brief(getattr(settings, name))
        if name == "data":
            was, given = "the text", "other text"
        raise ConfigError(f"{flag} must be {was}, as in the run in {path.parent}, or --out new, not {given}.")
    return int(step)
