"""Trains a part of any kind, which learns to predict the model's distribution (proposers/learning/distillation.py)."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.trained import TrainedPart
from vllm_specplugins.proposers.learning.distillation import Guesser, distil
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import save_whole

WARM_UP = 0.05  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that determine the weights of a run. Each kind of part adds fields."""

    steps: int
    batch_tokens: int  # of a step, about
    row_tokens: int  # of a row, at most
    learning_rate: float  # at its highest
    seed: int  # seed for the order of the rows
    num_draft: int = 1  # number of consecutive draft tokens that it learns to predict

    @property
    def batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.row_tokens)

    @abstractmethod
    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """Returns the limits of the part's fields for a model."""

    @abstractmethod
    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> TrainedPart:
        """Returns the part before its training, in float32; it may depend on some rows."""

    @abstractmethod
    def guesser(self, base: BaseModel, part: Any) -> Guesser:
        """Returns the part's drafter, as in serving, for a whole row at once."""

    @abstractmethod
    def serving(self, folder: Path) -> dict[str, Any]:
        """Returns the value of --speculative-config."""

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
    """Trains a part on rows of token ids and saves it in `out`, in the model's dtype. `advance` is called with the
    number of finished steps and the loss, in nats per draft token. Raises ConfigError if `out` cannot be written."""
    part = settings.begin(base, rows)
    part.requires_grad_()
    optimizer = torch.optim.AdamW(part.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    guesser, batches = settings.guesser(base, part), row_batches(len(rows), settings.batch_rows, settings.seed)
    for step, batch in zip(range(settings.steps), batches, strict=False):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * schedule(step, settings.steps)
        texts = [rows[index] for index in batch]
        loss = distil(base, base.hidden_states(texts), guesser, settings.num_draft, sum(map(len, texts)))
        optimizer.step()
        optimizer.zero_grad()
        advance(step + 1, loss)
    save_whole(out, lambda folder: part.save(folder, base.dtype))
    part.requires_grad_(False).to(base.dtype).float()  # the scores are those of the saved part
    return part


def schedule(step: int, steps: int) -> float:
    """Returns the share of the highest learning rate, which rises during the first WARM_UP steps (a share) and then
    falls to 0."""
    return min(1.0, (step + 1) / (WARM_UP * steps + 1)) * (1 - step / steps)


def row_batches(num_rows: int, batch_rows: int, seed: int) -> Iterator[list[int]]:
    """Yields batches of rows endlessly: each row once per epoch, in a new order per epoch."""
    generators = (torch.Generator().manual_seed(seed * 1_000_003 + epoch) for epoch in count())
    rows = chain.from_iterable(torch.randperm(num_rows, generator=generator).tolist() for generator in generators)
    while True:
        yield list(islice(rows, batch_rows))
