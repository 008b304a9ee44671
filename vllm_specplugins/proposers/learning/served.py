"""The end of the served model, as training needs it: what embeds a token, the final norm and the head, frozen."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_specplugins.proposers.heads.distillation import Run, States
from vllm_specplugins.proposers.learning.windows import Window


@dataclass(frozen=True, slots=True)
class ServedEnd:
    """A `distillation.Model` whose passes run no layer. The engine's own operations may have no gradients.

    Args:
        embed: what stands in front of the first layer, [T, H] of token ids [T].
        norm_weight: [H] float32 what the final norm multiplies by.
        norm_eps: of it.
        head_weight: [V, H].
        scale, soft_cap: of logits; a soft cap of c makes them c * tanh(logits / c).
        num_layers: of the target.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    norm_weight: torch.Tensor
    norm_eps: float
    head_weight: torch.Tensor
    scale: float
    soft_cap: float | None
    num_layers: int

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See distillation.Model."""
        logits = F.linear(normed.to(self.head_weight.dtype), self.head_weight).float()
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits * self.scale

    def passes(self, first: int, num_tokens: int) -> Run:
        """See distillation.Model; `first` is num_layers."""

        def run(states: torch.Tensor, step: int = 0) -> torch.Tensor:
            return F.rms_norm(states.float(), self.norm_weight.shape, self.norm_weight, self.norm_eps)

        return run

    def states_of(self, window: Window) -> States:
        """Of a window's tokens, what stands in front of the first layer, what an exit's layer left if that is known, as
        if it were after each one, and what stands after the last."""
        *exits, last = window.states.split(len(self.norm_weight), -1)
        with torch.no_grad():
            return [self.embed(window.token_ids), *(exits or [last]) * (self.num_layers - 1), last]
