"""Some of the target's layers, and its head, as callables: what `PagedForward` runs on both runners."""

import copy
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from vllm_specplugins.config import ConfigError, EarlyExitConfig, SpecConfig, stage_configs
from vllm_specplugins.engine.excepthook import sentence_instead_of_traceback
from vllm_specplugins.engine.target.compiled import compile_cut, compiles
from vllm_specplugins.engine.target.model_source import PARTS, takes_no_states, uncuttable
from vllm_specplugins.methods import drafters, enters_states

logger = logging.getLogger("vllm.specplugins")


class FirstLayers:
    """Runs a decoder's own forward with another `start_layer` or `end_layer`: its embedding scale, norms and residuals
    are its own.

    vLLM's decoder bodies loop over `layers[start_layer:end_layer]`. A shallow copy of the body shares every weight
    and the attention layers with their KV pages.
    """

    def __init__(self, target: nn.Module, config: SpecConfig):
        self._compiled: set[tuple[int, bool]] = set()
        self._target: Any = target
        self._body: Any = getattr(target, "model", None)
        self._run: dict[tuple[Any, ...], Callable[..., torch.Tensor]] = {}  # by first and last layer, and norm
        model = type(target).__name__
        if any(row.cuts_layers for row, _ in drafters(config)) and not all(hasattr(self._body, name) for name in PARTS):
            _refuse(uncuttable(config.method, model))
        if enters_states(config) and not self._takes_states():
            _refuse(takes_no_states(config.method, model))

    def __call__(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after layers [0, end_layer) and, if `normed`, the final norm."""
        return self._cut(0, end_layer, normed)(token_ids, positions, None)

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What stands in front of the first layer: [num_tokens, hidden_size] of token ids [num_tokens]."""
        embeddings: torch.Tensor = self._body.embed_input_ids(token_ids)
        return embeddings

    def of_states(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after layers [first_layer, end_layer) of states in front of them.

        Where these are no layers, nothing attends, and no forward context is needed.
        """
        if first_layer == end_layer:  # a body's forward expects a residual that only layers leave
            alone: torch.Tensor = self._body.norm(states) if normed else states
            return alone
        return self._cut(first_layer, end_layer, normed)(None, positions, None, inputs_embeds=states)

    def _cut(self, *layers: Any) -> Callable[..., torch.Tensor]:
        if layers not in self._run:  # `forward`, not a call: the body's compiled code, if there is any, has all layers
            self._run[layers] = self._cut_body(*layers).forward
        return self._run[layers]

    @torch.inference_mode()
    def _takes_states(self) -> bool:
        """Whether the body's forward hands its layers the states that it is given; some families scale them."""
        # No token is embedded here: which adapter would do so is not known yet.
        states = torch.ones_like(self._body.norm.weight)[None]
        first = torch.zeros(1, dtype=torch.int64, device=states.device)
        try:
            known = self._cut(0, 0, False)(None, first, None, inputs_embeds=states.clone())
        except (AttributeError, TypeError):
            return False
        return hasattr(self._body, "embed_input_ids") and torch.equal(known, states)

    def compile(self, config: SpecConfig) -> None:
        """Compiles what the exits of a method run, if vLLM compiles the target; before the first request."""
        exits = {(part.exit_layer, part.exit_head is None) for part in stage_configs(config, EarlyExitConfig)}
        if not exits or not compiles(self._body):
            return
        for end_layer, normed in sorted(exits - self._compiled):
            self._compiled.add((end_layer, normed))
            tag = f"exit_{end_layer}" + ("" if normed else "_unnormed")
            self._run[0, end_layer, normed] = compile_cut(self._cut_body(0, end_layer, normed), tag)

    def _cut_body(self, first_layer: int, end_layer: int, normed: bool) -> nn.Module:
        cut = copy.copy(self._body)
        cut.start_layer, cut.end_layer = first_layer, end_layer
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
        processor: Any = getattr(self._target, "logits_processor", None)
        head = getattr(self._target, "lm_head", None)
        has_best = hasattr(processor, "get_top_tokens")  # not so where adapters add to the logits
        if not has_best or getattr(head, "tp_size", 1) == 1 or processor.scale <= 0:
            return self.logits(hidden_states).argmax(dim=-1)
        token_ids: torch.Tensor = processor.get_top_tokens(head, hidden_states)
        return token_ids


class _Sum(nn.Module):
    """In place of a final norm: the residual stream as it is."""

    def forward(self, hidden_states: torch.Tensor, *residual: torch.Tensor | None) -> Any:
        """Some families, as Granite, keep no residual apart; their norms return one tensor."""
        if not residual:
            return hidden_states
        return hidden_states if residual[0] is None else hidden_states + residual[0], None


def _refuse(refusal: ConfigError) -> NoReturn:
    logger.error("%s", refusal)  # what an engine's process raises, vLLM wraps in tracebacks
    with sentence_instead_of_traceback():
        raise refusal
    raise AssertionError("unreachable")
