"""Attention of trees on a CPU, by its reference: the kernels take a tenth of a second in the interpreter."""

from functools import partial
from typing import Any

import torch
from vllm_specplugins.kernels.trees import Cache, Mask, Query, reference

BACKEND = "vllm_specplugins.engine.v2.trees.attention.TreeAttentionBackend"


def attend_by_reference(patches: Any) -> None:
    """A CPU's platform has one attention, which is that of trees from now on; each launch is one step of a tape."""
    from vllm.v1.attention.backends import registry, triton_attn

    patches.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN, BACKEND)
    patches.setattr(triton_attn, "unified_attention", attend_causally)
    patches.setattr(triton_attn, "triton_reshape_and_cache_flash", write_cache)
    patches.setattr("vllm_specplugins.engine.v2.trees.attention.attend", attend)


def launch(name: str, kernel: Any, writes: list[torch.Tensor]) -> None:
    from simulated_device import tape

    tape.launch(name, kernel, writes)


def attend(out: torch.Tensor, query: Query, cache: Cache, mask: Mask, scale: float) -> None:
    launch("attend", partial(reference.attend, out, query, cache, mask, scale), [out])


def attend_causally(q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, seqused_k: Any, **rest: Any) -> None:
    def kernel() -> None:
        query = Query(q, cu_seqlens_q, seqused_k, rest["block_table"], rest["max_seqlen_q"])
        mask = Mask(torch.full((len(q),), -1), torch.zeros(len(seqused_k)).int())
        reference.attend(out, query, Cache(k, v), mask, rest["softmax_scale"])

    launch("attend_causally", kernel, [out])


def write_cache(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *rest: Any) -> None:
    def kernel() -> None:
        used, size = slots >= 0, key_cache.shape[1]
        places = slots[used] // size, slots[used] % size
        key_cache[places], value_cache[places] = key[: len(slots)][used], value[: len(slots)][used]

    launch("write_cache", kernel, [key_cache, value_cache])
