"""The target's first layers and its head as callables: what `PagedForward` runs on both runners."""

import copy
import logging
from typing import Any

import torch
from torch import nn

from vllm_specplugins.engine.model_source import PARTS, uncuttable
from vllm_specplugins.engine.plugin import sentence_instead_of_traceback

logger = logging.getLogger("vllm.specplugins")


class FirstLayers:
    """Runs a decoder's own forward with another `end_layer`: its embedding scale, norms and residuals are its own.

    vLLM's decoder bodies loop over `layers[start_layer:end_layer]`. A shallow copy of the body shares every weight
    and the attention layers with their KV pages.
    """

    def __init__(self, target: nn.Module):
        body: Any = getattr(target, "model", None)
        if not all(hasattr(body, name) for name in PARTS):
            refusal = uncuttable("early_exit", type(target).__name__)
            logger.error("%s", refusal)  # what an engine's process raises, vLLM wraps in tracebacks
            with sentence_instead_of_traceback():
                raise refusal
        self._target: Any = target
        self._body = body
        self._cut: dict[tuple[int, bool], nn.Module] = {}

    def __call__(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after layers [0, end_layer) and, if `normed`, the final norm."""
        cut = self._cut.get((end_layer, normed))
        if cut is None:
            cut = self._cut[end_layer, normed] = self._cut_body(end_layer, normed)
        # `forward`, not a call: the body's compiled code, if there is any, holds all layers.
        hidden_states: torch.Tensor = cut.forward(token_ids, positions, None)
        return hidden_states

    def _cut_body(self, end_layer: int, normed: bool) -> nn.Module:
        cut = copy.copy(self._body)
        cut.end_layer = end_layer
        cut.aux_hidden_state_layers = ()
        if not normed:
            cut._modules = {**cut._modules, "norm": _Sum()}
        return cut

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's logits [num_tokens, vocab_size] of normed hidden states."""
        logits: torch.Tensor = self._target.compute_logits(hidden_states)
        return logits

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The largest logit's token ids [num_tokens]; tensor-parallel ranks exchange their best, not their logits."""
        processor = getattr(self._target, "logits_processor", None)
        head = getattr(self._target, "lm_head", None)
        if processor is None or head is None or getattr(head, "tp_size", 1) == 1 or processor.scale <= 0:
            return self.logits(hidden_states).argmax(dim=-1)
        token_ids: torch.Tensor = processor.get_top_tokens(head, hidden_states)
        return token_ids


class _Sum(nn.Module):
    """In place of a final norm: the residual stream as it is."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden_states + residual, None
