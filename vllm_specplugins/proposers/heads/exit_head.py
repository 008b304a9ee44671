"""A trained exit head, which turns the hidden states of some layers into logits, in place of the model's norm and head.
The command `train-exit-head` writes its folder. N: tokens, H: hidden size, V: vocabulary."""

from dataclasses import dataclass

import torch
from torch.nn import Linear, RMSNorm

from vllm_specplugins.proposers.heads.trained import Count, Epsilon, TrainedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHeadConfig:
    """The model and the layers for which a head was trained: `exit_layer` layers run before it, either the first ones
    or the `layers` with these indices."""

    exit_layer: Count
    hidden_size: Count
    vocab_size: Count
    rms_norm_eps: Epsilon
    layers: tuple[Count, ...] | None = None


class ExitHead(TrainedPart):
    """
    >>> config = ExitHeadConfig(exit_layer=1, hidden_size=2, vocab_size=3, rms_norm_eps=0.0)
    >>> head = ExitHead(config, {"norm.weight": torch.ones(2), "head.weight": torch.eye(3, 2)})
    >>> head.logits(torch.tensor([[3.0, 3.0]]))
    tensor([[1., 1., 0.]])
    """

    Config = ExitHeadConfig
    file, field, noun = "exit_head.safetensors", "early_exit: exit_head", "head"

    def make_layers(self) -> None:
        self.norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        self.head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, V] of hidden states [N, H] after these layers, before any norm."""
        return self.head(self.norm(hidden_states))
