"""A trained exit head: turns hidden states of an early layer into logits, in place of the model's own norm and head.

A folder with `config.json` and `exit_head.safetensors`. The head is a matrix of the vocabulary, or the product of two
(rank R), which also costs less to run. Knows nothing of vLLM; made by `python -m vllm_specplugins train-exit-head`.
N: tokens, H: hidden size, V: vocabulary, R: rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplugins.proposers.heads.trained import CONFIG_FILE, Kind, Weights

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "ExitHead", "ExitHeadConfig", "check_exit_head", "read_head_config"]

WEIGHTS_FILE = "exit_head.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHeadConfig:
    """What a head was made for.

    Args:
        exit_layer: how many layers run before it.
        hidden_size: H.
        vocab_size: V.
        rank: R; 0 is one full matrix.
        rms_norm_eps: of its norm.
    """

    exit_layer: int
    hidden_size: int
    vocab_size: int
    rank: int
    rms_norm_eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the weights file and their shapes."""
        hidden, vocab, rank = self.hidden_size, self.vocab_size, self.rank
        if rank == 0:
            return {"norm.weight": (hidden,), "head.weight": (vocab, hidden)}
        return {"norm.weight": (hidden,), "down.weight": (rank, hidden), "up.weight": (vocab, rank)}


KIND = Kind(ExitHeadConfig, WEIGHTS_FILE, "early_exit: exit_head", "head")


@dataclass(frozen=True, slots=True)
class ExitHead:
    """A head in memory; `weights` as ExitHeadConfig.shapes lists them.

    >>> config = ExitHeadConfig(exit_layer=1, hidden_size=2, vocab_size=3, rank=0, rms_norm_eps=0.0)
    >>> head = ExitHead(config, {"norm.weight": torch.ones(2), "head.weight": torch.eye(3, 2)})
    >>> head.logits(torch.tensor([[3.0, 3.0]]))
    tensor([[1., 1., 0.]])
    """

    config: ExitHeadConfig
    weights: Weights

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, H] after layer `exit_layer`, before any norm."""
        weights = self.weights
        hidden_states = F.rms_norm(
            hidden_states, (self.config.hidden_size,), weights["norm.weight"], self.config.rms_norm_eps
        )
        if self.config.rank == 0:
            return F.linear(hidden_states, weights["head.weight"])
        return F.linear(F.linear(hidden_states, weights["down.weight"]), weights["up.weight"])

    def save(self, folder: Path) -> None:
        """Writes the head into a folder, which is made if need be."""
        KIND.save(folder, self.config, self.weights)

    @classmethod
    def load(cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> "ExitHead":
        """The head in a folder that `check_exit_head` has passed."""
        return cls(*KIND.load(folder, device, dtype))


def check_exit_head(folder: str | Path, *, exit_layer: int, hidden_size: int, vocab_size: int) -> None:
    """Raises ConfigError unless a folder holds a whole head for this layer of a model of these sizes."""
    KIND.check(folder, exit_layer=exit_layer, hidden_size=hidden_size, vocab_size=vocab_size)


def read_head_config(folder: str | Path) -> ExitHeadConfig:
    """What the head in a folder was made for; ConfigError if there is none."""
    config: ExitHeadConfig = KIND.read_config(folder)
    return config
