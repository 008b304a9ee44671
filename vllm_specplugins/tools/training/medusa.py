"""Medusa heads in training: one residual layer for each draft token, under the model's own head (Cai et al. 2024).

They are saved in vLLM's format. T: tokens of a row, H: hidden size, M: heads.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save

from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.parts import Guess, States


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSettings(Settings):
    """Settings of Medusa heads, of which there are num_draft."""

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """See Settings."""
        return {"num_draft": (1, 64)}

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> "TrainedMedusa":
        """See Settings. Each begins as the model's own head, which says the next token."""
        size, device = base.hidden_size, base.model.device
        shapes = {"weight": (size, size), "bias": (size,)}
        return TrainedMedusa(
            {
                f"blocks.{head}.layers.0.{name}": torch.zeros(shape, device=device)
                for head in range(self.num_draft)
                for name, shape in shapes.items()
            }
        )


class TrainedMedusa:
    """See the module."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights

    def guesses(self, base: BaseModel, states: States, num_draft: int) -> Iterator[Guess]:
        """See Part. Drafts begin behind each token of the row but the first, before which there is no state."""
        last = states[-1].float()
        for head in range(min(num_draft, len(self.weights) // 2, len(last) - 1)):
            own = last[: len(last) - 1 - head]
            weight, bias = (self.weights[f"blocks.{head}.layers.0.{name}"] for name in ("weight", "bias"))
            yield Guess(base.logits(own + F.silu(F.linear(own, weight, bias))), head + 1)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """See Part."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.weights.items()}
        (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
        sizes = {"num_heads": len(weights) // 2, "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps({"model_type": "medusa", **sizes}, indent=1) + "\n")

    def serving(self, folder: Path) -> dict[str, Any]:
        """See Part."""
        num_heads = len(self.weights) // 2
        return {"method": "medusa", "heads": str(folder.resolve()), "num_speculative_tokens": num_heads}
