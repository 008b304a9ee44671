"""The target's first layers and its head as callables: what `PagedForward` runs on both runners."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_specplugins.config import EarlyExitConfig, SpecConfig
from vllm_specplugins.engine.plugin import sentence_instead_of_traceback
from vllm_specplugins.engine.target.compiled import compile_cut, compiles
from vllm_specplugins.engine.target.model_source import PARTS, uncuttable
from vllm_specplugins.methods import parts

logger = logging.getLogger("vllm.specplugins")


class FirstLayers:
    """Runs a decoder's own forward with another `end_layer`: its embedding scale, norms and residuals are its own.

    vLLM's decoder bodies loop over `layers[start_layer:end_layer]`. A shallow copy of the body shares every weight
    and the attention layers with their KV pages.
    """

    def __init__(self, target: nn.Module, config: SpecConfig):
        body: Any = getattr(target, "model", None)
        if parts(config, EarlyExitConfig) and not all(hasattr(body, name) for name in PARTS):
            refusal = uncuttable("early_exit", type(target).__name__)
            logger.error("%s", refusal)  # what an engine's process raises, vLLM wraps in tracebacks
            with sentence_instead_of_traceback():
                raise refusal
        self._target: Any = target
        self._body = body
        self._run: dict[tuple[int, bool], Callable[..., torch.Tensor]] = {}
        self._compiled: set[tuple[int, bool]] = set()

    def __call__(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after layers [0, end_layer) and, if `normed`, the final norm."""
        run = self._run.get((end_layer, normed))
        if run is None:
            # `forward`, not a call: the body's compiled code, if there is any, holds all layers.
            run = self._run[end_layer, normed] = self._cut_body(end_layer, normed).forward
        return run(token_ids, positions, None)

    def compile(self, config: SpecConfig) -> None:
        """Compiles what the exits of a method run, if vLLM compiles the target; before the first request."""
        exits = {(part.exit_layer, part.exit_head is None) for part in parts(config, EarlyExitConfig)}
        if not exits or not compiles(self._body):
            return
        for end_layer, normed in sorted(exits - self._compiled):
            self._compiled.add((end_layer, normed))
            tag = f"exit_{end_layer}" + ("" if normed else "_unnormed")
            self._run[end_layer, normed] = compile_cut(self._cut_body(end_layer, normed), tag)

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

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Some families, as Granite, keep no residual apart; their norms return one tensor."""
        return hidden_states if residual is None else (hidden_states + residual, None)
