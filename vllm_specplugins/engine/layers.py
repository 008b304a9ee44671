"""The target's first layers as a callable: what `PagedForward` runs on both runners."""

import copy
from typing import Any

import torch
from torch import nn

from vllm_specplugins.config import ConfigError


class FirstLayers:
    """Runs a decoder's own forward with another `end_layer`: its embedding scale, norms and residuals are its own.

    vLLM's decoder bodies loop over `layers[start_layer:end_layer]`. A shallow copy of the body shares every weight
    and the attention layers with their KV pages.
    """

    def __init__(self, target: nn.Module):
        body: Any = getattr(target, "model", None)
        if not all(hasattr(body, name) for name in ("layers", "start_layer", "end_layer")):
            raise ConfigError(f"early_exit: {type(target).__name__} has no stack of decoder layers that can be cut.")
        self._body = body
        self._cut: dict[int, nn.Module] = {}
        self.num_layers = len(self._body.layers)

    def __call__(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after layers [0, end_layer) and the final norm."""
        cut = self._cut.get(end_layer)
        if cut is None:
            cut = self._cut[end_layer] = copy.copy(self._body)
            cut.end_layer = end_layer
            cut.aux_hidden_state_layers = ()
        # `forward`, not a call: the body's compiled code, if there is any, holds all layers.
        hidden_states: torch.Tensor = cut.forward(token_ids, positions, None)
        return hidden_states
