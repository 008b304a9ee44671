"""The trained part of a jump, which predicts the state before a late layer of the target, so that no layer before it
runs. The command `train-jump` writes its folder. N: tokens, H: hidden size, R: inner size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import Linear, RMSNorm
from torch.nn.functional import silu

from vllm_specplugins.proposers.heads.trained import Count, Epsilon, TrainedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpHeadConfig:
    """The model and the layers for which a part was trained. The first `early_layers` layers run for a token before the
    jump (0: it reads the token's embedding), and the layers from `late_layer` on after it (num_layers: none)."""

    early_layers: Count
    late_layer: Count
    num_layers: Count
    hidden_size: Count
    inner_size: Count
    rms_norm_eps: Epsilon


class JumpHead(TrainedPart):
    """
    >>> config = JumpHeadConfig(
    ...     early_layers=0, late_layer=1, num_layers=2, hidden_size=1, inner_size=1, rms_norm_eps=0.0
    ... )
    >>> weights = {name: torch.zeros(tensor.shape) for name, tensor in JumpHead(config).state_dict().items()}
    >>> weights["mix.weight"] = torch.tensor([[0.0, 2.0]])  # twice the last state is added
    >>> JumpHead(config, weights).states(torch.tensor([[3.0]]), torch.tensor([[5.0]]))
    tensor([[13.]])
    """

    Config = JumpHeadConfig
    file, field, noun = "jump.safetensors", "jump: head", "head"

    def make_layers(self) -> None:
        hidden, inner = self.config.hidden_size, self.config.inner_size
        self.norm = RMSNorm(hidden, self.config.rms_norm_eps)
        self.mix = Linear(2 * hidden, hidden, bias=False)
        self.up, self.down = Linear(2 * hidden, inner, bias=False), Linear(inner, hidden, bias=False)

    def states(self, early: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Predicts the states [N, H] before layer `late_layer`, from the newest token's states after `early_layers`
        layers, [N, H], and the previous token's states after the final norm, [N, H], which come from the target or the
        last jump."""
        both = torch.cat((self.norm(early), last), dim=-1)
        return early + self.mix(both) + self.down(silu(self.up(both)))


def check_jump(folder: str | Path, *, num_layers: int, hidden_size: int) -> JumpHeadConfig:
    """Returns the configuration in a folder. Raises ConfigError unless the folder has a complete part for a model of
    these sizes."""
    config: JumpHeadConfig = JumpHead.check(folder, num_layers=num_layers, hidden_size=hidden_size)
    if not config.early_layers <= config.late_layer <= num_layers:
        wanted = f"a head whose late_layer is from early_layers to {num_layers}"
        JumpHead.refuse(folder, wanted, str(config.late_layer))
    return config
