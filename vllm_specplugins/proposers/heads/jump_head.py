"""The trained part of a jump: guesses the state in front of a late layer of the target, so that none before it runs.

A folder with `config.json` and `jump.safetensors`, made by `python -m vllm_specplugins train-jump`. Knows nothing of
vLLM. N: tokens, H: hidden size, R: inner size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplugins.proposers.heads.trained import Kind, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpHeadConfig:
    """What a part was made for.

    Args:
        early_layers: how many of the first layers run for a token before the jump; 0: its embedding alone is read.
        late_layer: how many layers lie before the first one that runs after the jump; all from there on run. If it is
            num_layers, none does.
        num_layers: of the target.
        hidden_size: H.
        inner_size: R.
        rms_norm_eps: of its norm.
    """

    early_layers: int
    late_layer: int
    num_layers: int
    hidden_size: int
    inner_size: int
    rms_norm_eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the weights file and their shapes."""
        hidden, inner = self.hidden_size, self.inner_size
        return {
            "norm.weight": (hidden,),
            "mix.weight": (hidden, 2 * hidden),
            "up.weight": (inner, 2 * hidden),
            "down.weight": (hidden, inner),
        }


KIND = Kind(JumpHeadConfig, "jump.safetensors", "jump: head", "head")


@dataclass(frozen=True, slots=True)
class JumpHead:
    """A part in memory; `weights` as JumpHeadConfig.shapes lists them.

    >>> config = JumpHeadConfig(
    ...     early_layers=0, late_layer=1, num_layers=2, hidden_size=1, inner_size=1, rms_norm_eps=0.0
    ... )
    >>> weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    >>> weights["mix.weight"] = torch.tensor([[0.0, 2.0]])  # twice the last state is added
    >>> JumpHead(config, weights).states(torch.tensor([[3.0]]), torch.tensor([[5.0]]))
    tensor([[13.]])
    """

    config: JumpHeadConfig
    weights: Weights

    def states(self, early: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """States [N, H] in front of layer `late_layer`.

        Args:
            early: [N, H] of the newest token, after `early_layers` layers.
            last: [N, H] of the token before it, after the final norm: the target's, or what the last jump left.
        """
        weights, config = self.weights, self.config
        normed = F.rms_norm(early, (config.hidden_size,), weights["norm.weight"], config.rms_norm_eps)
        both = torch.cat((normed, last), dim=-1)
        inner = F.silu(F.linear(both, weights["up.weight"]))
        return early + F.linear(both, weights["mix.weight"]) + F.linear(inner, weights["down.weight"])

    def save(self, folder: Path) -> None:
        """Writes the part into a folder, which is made if need be."""
        KIND.save(folder, self.config, self.weights)

    @classmethod
    def load(cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> "JumpHead":
        """The part in a folder that `check_jump` has passed."""
        return cls(*KIND.load(folder, device, dtype))


def check_jump(folder: str | Path, *, num_layers: int, hidden_size: int) -> JumpHeadConfig:
    """The configuration in a folder; ConfigError unless it holds a whole part for a model of these sizes."""
    config: JumpHeadConfig = KIND.check(folder, num_layers=num_layers, hidden_size=hidden_size)
    if not config.early_layers <= config.late_layer <= num_layers:
        KIND.refuse(folder, f"a head whose late_layer is from early_layers to {num_layers}", str(config.late_layer))
    return config
