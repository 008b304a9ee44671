"""Look-ahead tokens: trained embeddings that stand for draft tokens not yet known, so that one pass drafts them all.

Monea et al. 2023, "PaSS: Parallel Speculative Sampling". A folder with `config.json` and `look_ahead.safetensors`, made
by `python -m vllm_specplugins train-look-ahead`. Knows nothing of vLLM. M: embeddings, H: hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.proposers.heads.trained import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadConfig:
    """What embeddings were made for.

    Args:
        exit_layer: how many layers they run through.
        hidden_size: H.
        num_embeddings: M; the k-th stands for the k-th draft token while the next one is drafted.
    """

    exit_layer: int
    hidden_size: int
    num_embeddings: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the weights file and their shapes."""
        return {"embeddings.weight": (self.num_embeddings, self.hidden_size)}


KIND = Kind(LookAheadConfig, "look_ahead.safetensors", "early_exit: look_ahead", "set of embeddings")


def save_look_ahead(folder: Path, config: LookAheadConfig, embeddings: torch.Tensor) -> None:
    """Writes embeddings [M, H] into a folder, which is made if need be."""
    KIND.save(folder, config, {"embeddings.weight": embeddings})


def load_look_ahead(folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The embeddings [M, H] in a folder that `check_look_ahead` has passed."""
    return KIND.load(folder, device, dtype)[1]["embeddings.weight"]


def check_look_ahead(folder: str | Path, *, exit_layer: int, hidden_size: int, num_draft: int) -> None:
    """Raises ConfigError unless a folder holds embeddings for drafts of so many tokens at this layer."""
    config: LookAheadConfig = KIND.check(folder, exit_layer=exit_layer, hidden_size=hidden_size)
    if config.num_embeddings < num_draft - 1:
        wanted = f"a {KIND.noun} of at least {num_draft - 1}, one less than num_speculative_tokens"
        KIND.refuse(folder, wanted, f"of {config.num_embeddings}")
