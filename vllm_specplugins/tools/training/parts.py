"""What can be trained: parts that guess, from a frozen model's states, what the model says next, and after that.

A guess for each draft token: of all drafts of a row at once, with the row's own text as the tokens drafted before.
T: tokens of a row, H: hidden size, V: vocabulary, L: layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vllm_specplugins.tools.base_model import BaseModel

States = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft token of every draft of a row; the tokens of one draft have the same index in all guesses.

    Args:
        logits: [N, V] float32.
        start: the first one is about what the model says at this token of the row.
    """

    logits: torch.Tensor
    start: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """[N, V] of what the model says, [T, V], that which this is a guess of."""
        return full[self.start : self.start + len(self.logits)]


class Part(Protocol):
    """A part in training."""

    weights: dict[str, torch.Tensor]  # float32

    def guesses(self, base: BaseModel, states: States, num_draft: int) -> Iterator[Guess]:
        """Its drafts in a row, of which n layers left states[n], [T, H]; the last one is after the final norm."""

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes what a proposer reads."""

    def serving(self, folder: Path) -> dict[str, Any]:
        """For --speculative-config."""


class TrainedHead:
    """A head that a proposer can load, in training."""

    def __init__(self, head: Any):  # ExitHead, JumpHead
        self.head, self.weights = head, head.weights

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """See Part."""
        weights = {name: tensor.detach().to(dtype) for name, tensor in self.weights.items()}
        type(self.head)(self.head.config, weights).save(folder)
