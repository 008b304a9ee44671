"""An exit head in training: a norm and a head that read an early layer as the model's own read its last one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.parts import Guess, States, TrainedHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHeadSettings(Settings):
    """Settings of an exit head.

    Args:
        exit_layer: how many layers run before the head.
        rank: R, 0 is one full matrix.
    """

    exit_layer: int
    rank: int

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """See Settings."""
        return {"exit_layer": (1, base.num_layers - 1), "rank": (0, min(base.head_weight.shape))}

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> "TrainedExitHead":
        """See Settings."""
        return TrainedExitHead(initial_head(base, self.exit_layer, self.rank))


class TrainedExitHead(TrainedHead):
    """See the module."""

    def guesses(self, base: BaseModel, states: States, num_draft: int) -> Iterator[Guess]:
        """See Part. Its draft tokens are all said in the same way."""
        logits = self.head.logits(states[self.head.config.exit_layer].float())
        for start in range(min(num_draft, len(logits))):
            yield Guess(logits[start:], start)

    def serving(self, folder: Path) -> dict[str, Any]:
        """See Part."""
        return {"method": "early_exit", "exit_layer": self.head.config.exit_layer, "exit_head": str(folder.resolve())}


def initial_head(base: BaseModel, exit_layer: int, rank: int) -> ExitHead:
    """The model's own norm and head, in float32; with a rank, the nearest matrix of that rank (Eckart, Young 1936)."""
    weight = base.head_weight.float()
    config = ExitHeadConfig(
        exit_layer=exit_layer,
        hidden_size=base.hidden_size,
        vocab_size=len(weight),
        rank=rank,
        rms_norm_eps=base.norm_eps,
    )
    weights = {"norm.weight": base.norm_weight.clone()}
    if rank == 0:
        return ExitHead(config, {**weights, "head.weight": weight.clone()})
    # [H, R]: the directions in which the head's rows are longest; cheaper than an SVD of [V, H].
    directions = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -rank:]
    return ExitHead(config, {**weights, "down.weight": directions.T.contiguous(), "up.weight": weight @ directions})
