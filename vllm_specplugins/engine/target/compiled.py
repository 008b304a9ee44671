"""Compiles cut bodies if vLLM compiles its models. vLLM's caches, in memory and on disk, use the class and the
configuration as keys, and vLLM drops the guards that would detect another `end_layer`. Each cut body therefore gets a
new class, forward method and tag, like vLLM's drafters."""

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context

from vllm_specplugins.isolation.faults import cause_text

logger = logging.getLogger("vllm.specplugins")


def compiles(body: nn.Module) -> bool:
    return isinstance(body, TorchCompileWithNoGuardsWrapper) and not getattr(body, "do_not_compile", True)


def compile_cut(cut: Any, tag: str, takes_states: bool = False) -> Callable[..., torch.Tensor]:
    """Compiles a copy of the target's body and returns a function that replaces its `forward`. Compilation takes as
    long as vLLM's compilation of the same number of layers. After a failure the copy runs eagerly."""
    forward: Callable[..., torch.Tensor] = cut.forward
    try:
        return _compile(cut, tag, takes_states)
    except Exception as error:
        logger.warning(
            "torch.compile failed for %s (%s). Drafting runs it without compilation and is slower.",
            tag,
            cause_text(error),
        )
        return forward


def _compile(cut: Any, tag: str, takes_states: bool) -> Callable[..., torch.Tensor]:
    body, forward = type(cut), cut.forward
    cut.__class__ = type(f"{body.__name__}_{tag}", (body,), {"forward": _renamed(body.forward, tag)})
    cut.aot_compiled_fn = None  # the copy has the code of the whole body
    cut.was_aot_compile_fn_loaded_from_disk = False
    cut._compile_tag = tag
    config = cut.vllm_config
    max_rows = config.scheduler_config.max_num_batched_tokens
    # The largest number of draft tokens of a step; a smaller number would specialize the code.
    rows = min(max(2, config.scheduler_config.max_num_seqs * (config.num_speculative_tokens + 1)), max_rows)
    device = next(cut.parameters()).device
    token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
    with set_model_tag(tag), set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(cut)
        with set_forward_context(None, config, num_tokens=rows), torch.inference_mode():
            states = {"inputs_embeds": cut.embed_input_ids(token_ids)} if takes_states else {}
            cut(None if takes_states else token_ids, token_ids.long(), None, **states)

    def run(token_ids: Any, positions: torch.Tensor, intermediate_tensors: None, **states: Any) -> torch.Tensor:
        if len(positions) > max_rows:  # vLLM compiles for at most this number
            return forward(token_ids, positions, intermediate_tensors, **states)
        if not takes_states:
            return cut(token_ids.int(), positions, intermediate_tensors)
        return cut(None, positions, intermediate_tensors, inputs_embeds=states["inputs_embeds"].contiguous())

    return run


def _renamed(forward: Any, tag: str) -> FunctionType:
    """Returns the function with another name and code object, since caches use either as a key."""
    name = f"{forward.__name__}_{tag}"
    code = forward.__code__.replace(co_name=name)
    copied = FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    copied.__qualname__, copied.__module__ = f"{forward.__qualname__}_{tag}", forward.__module__
    return copied
