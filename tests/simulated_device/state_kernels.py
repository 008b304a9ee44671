"""Layers that keep a state (Mamba 2, gated delta net, short convolution) with the kernels that a GPU runs, interpreted.

vLLM's own for CPUs do not go back to the state before a draft that was rejected, and its gated delta net asks for
bfloat16. A prompt's kernels of Mamba 2 and of convolutions stay the CPU's: they leave one state, the last. Queries are
rotated in PyTorch: given [num_tokens, num_heads, head_size], as LFM 2 does, vLLM's operation for CPUs takes them as
if a token had head_size numbers, so that outputs go by the batch, without speculation, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from simulated_device.patches import Patches


@contextmanager
def state_kernels() -> Iterator[None]:
    """Engines must start, and end, inside of it."""
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gated_delta_net
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssu_dispatch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from vllm_specplugins.engine.frontend import spec_config

    convolution, recurrence = (_as_on_a_gpu(module) for module in (causal_conv1d, mamba_ssm))

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    with Patches() as patches:
        for layer in (mamba_mixer2, short_conv, gated_delta_net):
            patches.set(layer, "causal_conv1d_update", convolution.causal_conv1d_update)
            patches.set(layer, "current_platform", _Gpu(layer.current_platform))
        patches.set(spec_config, "current_platform", _Gpu(spec_config.current_platform))
        patches.set(mamba_ssm, "selective_state_update", recurrence.selective_state_update)
        patches.set(ssu_dispatch, "_mamba_ssu_backend", None)
        patches.set(ssu_dispatch, "CPUSSUBackend", ssu_dispatch.TritonSSUBackend)
        registry = ssu_dispatch._BACKEND_REGISTRY
        patches.enter_context(patch.dict(registry, dict.fromkeys(registry, ssu_dispatch.TritonSSUBackend)))
        patches.set(gated_delta_net, "fla_chunk_gated_delta_rule", chunk_gated_delta_rule)
        patches.set(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
        patches.set(Autotuner, "run", tuned)  # there is nothing to measure
        yield


def chunk_gated_delta_rule(
    q: torch.Tensor,  # [1, num_tokens, num_k_heads, k_dim], normalised; so is k
    k: torch.Tensor,
    v: torch.Tensor,  # [1, num_tokens, num_v_heads, v_dim]
    g: torch.Tensor,  # [1, num_tokens, num_v_heads], the logarithm of what is kept; so is beta
    beta: torch.Tensor,
    initial_state: torch.Tensor,  # [num_reqs, num_v_heads, v_dim, k_dim]
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's tokens one by one: vLLM's kernel for chunks takes bfloat16 alone."""
    heads = v.shape[2] // k.shape[2]
    q, k = (part[0].repeat_interleave(heads, 1) for part in (q, k))
    states, outputs = initial_state.clone(), torch.empty_like(v)
    for request, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = states[request]
        for t in range(start, end):
            state *= g[0, t].exp()[:, None, None]
            change = beta[0, t, :, None] * (v[0, t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state += torch.einsum("hv,hk->hvk", change, k[t])
            outputs[0, t] = torch.einsum("hvk,hk->hv", state, q[t]) * k.shape[-1] ** -0.5
    return outputs, states


class _Gpu:
    """The platform, as one that is no CPU."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def _as_on_a_gpu(module: ModuleType) -> ModuleType:
    """A module of kernels of which a CPU hides Triton's as soon as it is imported."""
    from vllm.platforms.interface import Platform

    spec = spec_from_file_location(f"simulated_device.{module.__name__.rpartition('.')[2]}", str(module.__file__))
    assert spec is not None and spec.loader is not None
    copy = module_from_spec(spec)
    with patch.object(Platform, "is_cpu", lambda self: False):
        spec.loader.exec_module(copy)
    return copy
