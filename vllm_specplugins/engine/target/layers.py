"""Runs some of the target's layers and its head for both runners, on the target's paged KV cache, with the LoRA
adapters of the rows."""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vllm_specplugins.config import EarlyExitConfig, JumpConfig, SpecConfig, stage_configs
from vllm_specplugins.engine.hooks import sentence_instead_of_traceback
from vllm_specplugins.engine.target.compiled import compile_cut, compiles
from vllm_specplugins.engine.target.model_source import PARTS, takes_no_states, uncuttable
from vllm_specplugins.methods import drafters, enters_states
from vllm_specplugins.proposers.heads.jump_head import JumpHead
from vllm_specplugins.target import Layers

logger = logging.getLogger("vllm.specplugins")

_CLAIMS = ("supports_draft_decode_metadata_update", "update_draft_decode_metadata", "__init__")


class Cut(NamedTuple):
    """The layers with these indices and, if `normed`, the final norm. Their inputs are tokens or states."""

    layers: tuple[int, ...]
    normed: bool
    takes_states: bool = False

    @property
    def span(self) -> tuple[int, int] | None:
        """Returns the first layer and the end, if no layer between them is skipped."""
        first, end = (self.layers[0], self.layers[-1] + 1) if self.layers else (0, 0)
        return (first, end) if end - first == len(self.layers) else None

    @property
    def tag(self) -> str:
        """Returns a unique name for this cut.

        >>> Cut((0, 1), True).tag, Cut((0, 2), False, takes_states=True).tag
        ('layers_0_2', 'layers_0x5_unnormed_states')
        """
        layers = "{}_{}".format(*self.span) if self.span else f"{sum(1 << layer for layer in self.layers):#x}"
        words = (*("unnormed",) * (not self.normed), *("states",) * self.takes_states)
        return "_".join(("layers", layers, *words))


def _indices(layers: Layers) -> tuple[int, ...]:
    return tuple(range(layers)) if isinstance(layers, int) else layers


def _cuts(config: SpecConfig) -> set[Cut]:
    exits = {
        Cut(_indices(part.drafting_layers), part.exit_head is None, part.one_pass)
        for part in stage_configs(config, EarlyExitConfig)
    }
    jumps = [JumpHead.read_config(part.head) for part in stage_configs(config, JumpConfig)]
    early = {Cut(_indices(jump.early_layers), False) for jump in jumps}
    late = {Cut(tuple(range(jump.late_layer, jump.num_layers)), True, True) for jump in jumps}
    return {cut for cut in exits | early | late if cut.layers}


class FirstLayers:
    """Runs a decoder body's forward method with other `layers`, `start_layer` or `end_layer`: vLLM's bodies loop over
    `layers[start_layer:end_layer]`. A shallow copy of the body shares its weights, attention layers and KV pages. The
    embedding scale, norms and residuals of the model stay unchanged."""

    def __init__(self, target: nn.Module, config: SpecConfig):
        self._target: Any = target
        self._body: Any = getattr(target, "model", None)
        self._run: dict[Cut, Callable[..., torch.Tensor]] = {}
        model = type(target).__name__
        refusal = None
        if any(row.cuts_layers for row, _ in drafters(config)) and not all(hasattr(self._body, name) for name in PARTS):
            refusal = uncuttable(config.method, model)
        elif enters_states(config) and not self._takes_states():
            refusal = takes_no_states(config.method, model)
        if refusal is not None:
            logger.error("The engine stops: %s", refusal)  # vLLM wraps what an engine's process raises in tracebacks
            with sentence_instead_of_traceback():
                raise refusal

    def __call__(
        self, layers: Layers, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Returns hidden states [num_tokens, hidden_size] after these layers and, if `normed`, the final norm."""
        return self._cut(Cut(_indices(layers), normed))(token_ids, positions, None)

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns states [num_tokens, hidden_size] before the first layer, of token ids [num_tokens]."""
        return self._body.embed_input_ids(token_ids)

    def of_states(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        """Returns hidden states [num_tokens, hidden_size] after layers [first_layer, end_layer), from the states before
        them. If the range is empty, no attention runs, and no forward context is needed."""
        if first_layer == end_layer:  # a body's forward expects the residual of a layer
            return self._body.norm(states) if normed else states
        cut = Cut(tuple(range(first_layer, end_layer)), normed, takes_states=True)
        return self._cut(cut)(None, positions, None, inputs_embeds=states)

    def _cut(self, cut: Cut) -> Callable[..., torch.Tensor]:
        if cut not in self._run:  # `forward`, not a call: the body's compiled code, if any, has all layers
            self._run[cut] = self._cut_body(cut).forward
        return self._run[cut]

    @torch.inference_mode()
    def _takes_states(self) -> bool:
        """Returns whether the body's forward passes the given states to its layers; some families scale them."""
        # This embeds no token, since the token's adapter is not known yet.
        states = torch.ones_like(self._body.norm.weight)[None]
        first = torch.zeros(1, dtype=torch.int64, device=states.device)
        try:
            given = self._cut(Cut((), False, True))(None, first, None, inputs_embeds=states.clone())
        except (AttributeError, TypeError):
            return False
        return hasattr(self._body, "embed_input_ids") and torch.equal(given, states)

    def compile(self, config: SpecConfig) -> None:
        """Compiles a method's layers before the first request, if vLLM compiles the target."""
        for cut in sorted(_cuts(config)) if compiles(self._body) else ():
            self._run[cut] = compile_cut(self._cut_body(cut), cut.tag, cut.takes_states)

    def _cut_body(self, cut: Cut) -> nn.Module:
        body, parts = copy.copy(self._body), dict[str, nn.Module]()
        body.start_layer, body.end_layer = cut.span or (0, len(cut.layers))
        body.aux_hidden_state_layers = ()
        if cut.span is None:
            parts["layers"] = nn.ModuleList([self._body.layers[layer] for layer in cut.layers])
        if not cut.normed:
            parts["norm"] = _Sum()
        body._modules = {**body._modules, **parts}
        return body

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits [num_tokens, vocab_size] of normed hidden states."""
        return self._target.compute_logits(hidden_states)

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns token ids [num_tokens] of the largest logits. Tensor-parallel ranks exchange their best tokens
        instead of all logits."""
        processor: Any = getattr(self._target, "logits_processor", None)
        head = getattr(self._target, "lm_head", None)
        has_best = hasattr(processor, "get_top_tokens")  # not if adapters change the logits
        if not has_best or getattr(head, "tp_size", 1) == 1 or processor.scale <= 0:
            return self.logits(hidden_states).argmax(dim=-1)
        return processor.get_top_tokens(head, hidden_states)


class _Sum(nn.Module):
    """Returns the residual stream unchanged, in place of a final norm."""

    def forward(self, hidden_states: torch.Tensor, *residual: torch.Tensor | None) -> Any:
        if not residual:  # some families, such as Granite, have no separate residual, and their norms return one tensor
            return hidden_states
        return hidden_states if residual[0] is None else hidden_states + residual[0], None


class Adapters:
    """Applies each request's LoRA adapter in drafting layers. vLLM's wrapped layers read one mapping from token rows to
    adapters, which each step rebuilds."""

    def __init__(
        self,
        select: Callable[..., None],  # of vLLM: takes adapter ids by row of logits and by row of tokens, and requests
        ids: np.ndarray[Any, np.dtype[np.int32]],  # [num_reqs], 0: none
        requests: set[Any],
    ):
        self._select, self._ids, self._requests = select, ids, requests
        self._length = 0

    def spread(self, length: int) -> None:
        """Selects adapters for rows of `length` tokens of each request."""
        if length == self._length:
            return
        rows = tuple(self._ids.repeat(length).tolist())
        self._select(rows, rows, self._requests)
        self._length = length


class PagedLayers:
    """target.PagedForward without attention, which each runner adds. T: tokens per request."""

    # Prepares attention at positions [num_reqs] or [num_reqs, T], and returns them as [num_reqs * T].
    attention: Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]

    def __init__(self, layers: FirstLayers, adapters: Adapters | None):
        self._layers, self._adapters = layers, adapters
        self.logits, self.argmax = layers.logits, layers.argmax

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._spread(token_ids)
        return self._layers.embeddings(token_ids)

    def hidden_states(
        self, layers: Layers, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        run = partial(self._layers, layers, normed=normed)
        return self._at(run, token_ids, positions).view(*token_ids.shape, -1)

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        run = partial(self._layers.of_states, first_layer, end_layer, normed=normed)
        if first_layer == end_layer:
            return run(states.flatten(0, -2), positions).view(states.shape)
        return self._at(run, states, positions).view(states.shape)

    def _at(self, run: Callable[..., torch.Tensor], fed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._spread(positions)
        with self.attention(positions) as flat:
            return run(fed.flatten(0, positions.ndim - 1), flat)

    def _spread(self, rows: torch.Tensor) -> None:
        if self._adapters is not None:
            self._adapters.spread(1 if rows.ndim == 1 else rows.shape[1])


def updates_in_place(group: Any) -> bool:
    """Returns whether the attention metadata of a draft can be updated in place. A class that overrides only `build`
    inherits the flag and an unsuitable update: chunked local attention computes batches from lengths."""
    if not group.supports_draft_decode_metadata_update:
        return False
    kinds = type(group.get_metadata_builder()).__mro__
    builds = next(index for index, kind in enumerate(kinds) if "build" in vars(kind))
    claims = next(index for index, kind in enumerate(kinds) if any(name in vars(kind) for name in _CLAIMS))
    return claims <= builds


def adapters_of(runner: Any, input_batch: Any, rehearses: bool) -> Adapters:
    state = runner.lora_state
    if rehearses:
        return Adapters(runner._set_active_loras, np.zeros(input_batch.num_reqs, np.int32), set())
    ids, requests = state.lora_ids[input_batch.idx_mapping_np], state.get_activate_loras(input_batch.req_ids)
    return Adapters(runner._set_active_loras, ids, requests)


def map_all_logits(runner: Any) -> None:
    """Maps each row of logits to an adapter: vLLM maps one row per request, but a step that verifies drafts has
    more."""
    prepare_inputs, make_lora_inputs = runner.prepare_inputs, runner.lora_state.make_lora_inputs
    num_logits = np.zeros(0, np.int64)

    def prepared(*args: Any) -> Any:
        nonlocal num_logits
        input_batch = prepare_inputs(*args)
        num_logits = np.diff(input_batch.cu_num_logits_np)
        return input_batch

    def mapped(*args: Any) -> Any:
        by_request, by_token, requests = make_lora_inputs(*args)
        return tuple(np.repeat(by_request, num_logits).tolist()), by_token, requests

    runner.prepare_inputs, runner.lora_state.make_lora_inputs = prepared, mapped
