"""The frozen end of the served model: the embeddings, the final norm and the head. Its operations have gradients, which
the engine's operations may lack. T: tokens, H: hidden size, V: vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_specplugins.proposers.learning.distillation import Run, States
from vllm_specplugins.proposers.learning.windows import Window


@dataclass(frozen=True, slots=True)
class ServedEnd:
    """A `distillation.Model` that runs no layer.

    Args:
        embed: embeddings [T, H] of token ids [T].
        norm_weight: [H] float32, the factors of the final norm.
        head_weight: [V, H].
        scale, soft_cap: applied to logits; a soft cap of c maps them to c * tanh(logits / c).
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    norm_weight: torch.Tensor
    norm_eps: float
    head_weight: torch.Tensor
    scale: float
    soft_cap: float | None
    num_layers: int

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits = F.linear(normed.to(self.head_weight.dtype), self.head_weight).float()
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale

    def passes(self, first: int, num_tokens: int) -> Run:
        def run(states: torch.Tensor, step: int = 0) -> torch.Tensor:
            return F.rms_norm(states.float(), self.norm_weight.shape, self.norm_weight, self.norm_eps)

        return run

    def states_of(self, window: Window) -> States:
        """Returns the embeddings of a window's tokens, the states after each layer, and the states after the final
        norm. The states of an exit's layer, or the last states, replace the states of the layers in between."""
        *exits, last = window.states.split(len(self.norm_weight), -1)
        with torch.no_grad():
            return [self.embed(window.token_ids), *(exits or [last]) * (self.num_layers - 1), last]
