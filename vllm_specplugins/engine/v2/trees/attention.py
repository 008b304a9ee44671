"""Adds a mask of ancestors to vLLM's Triton attention, for steps that verify trees; other steps run vLLM's kernel.
Tokens outside of a tree are causal, so trees, chains and chunks of prompts share one launch. Long texts are not split,
so one program reads all keys of a request."""

from typing import Any

import torch
from torch import nn
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_specplugins.config import ConfigError
from vllm_specplugins.kernels.trees import Cache, Mask, Query, attend


class TreeAttentionImpl(TritonAttentionImpl):
    trees: Any = None  # state.Trees of the runner; set when its layers are known

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name, has_any in {
            "a sliding window": self.sliding_window != (-1, -1) or self.chunk_lookback != -1,
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "soft-capped attention": bool(self.logits_soft_cap),
            "a quantised KV cache": self.kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            "keys and values of another layer": self.kv_sharing_target_layer_name is not None,
        }.items():
            if has_any:
                raise ConfigError(f"remove tree: it does not support a model with {name}.")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Returns False: the attention of trees has no output scale, which vLLM's compiler would pass for FP8
        weights."""
        return False

    def forward(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **others: Any,
    ) -> torch.Tensor:
        trees = self.trees
        if trees is None or attn_metadata is None or not trees.masks or attn_metadata.max_query_len == 1:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **others)
        rows = slice(attn_metadata.num_actual_tokens)
        ragged = Query(
            query[rows], attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table,
            attn_metadata.max_query_len,
        )  # fmt: skip
        cache = Cache(*kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
        attend(output[rows], ragged, cache, Mask(trees.bits, trees.first), self.scale)
        return output


class TreeAttentionBackend(TritonAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for backends of other packages

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl
