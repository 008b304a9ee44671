"""Tiny checkpoints of several model families with random weights, made when a test first asks for one.

The first half of the layers decides most of what such a model says and the second half amends it, so that early exit
drafts something that is sometimes accepted and sometimes not.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from shortened import new_folder
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

NUM_LAYERS = 4
EXIT_LAYER = NUM_LAYERS // 2
VOCAB_SIZE = 512
SLIDING_WINDOW = 40  # no multiple of the block size, and shorter than most prompts
LATE = 0.25  # what a layer of the second half adds, as a share of what one of the first half adds

SHAPE: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
}
UNTIED: dict[str, Any] = {**SHAPE, "tie_word_embeddings": False}
GEMMA: dict[str, Any] = {**SHAPE, "query_pre_attn_scalar": 32, "sliding_window": SLIDING_WINDOW}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**UNTIED),
    "qwen2": Qwen2Config(**{**UNTIED, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**UNTIED),
    "qwen3_moe": Qwen3MoeConfig(**UNTIED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    "mistral": MistralConfig(**UNTIED, sliding_window=SLIDING_WINDOW),
    "gemma2": Gemma2Config(**GEMMA, layer_types=[LOCAL, GLOBAL, LOCAL, GLOBAL]),  # with both of its soft caps
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=[LOCAL, GLOBAL, LOCAL, LOCAL]),
}


@functools.cache
def checkpoint(family: str) -> Path:
    """A folder with a model of this family; it is removed when the process ends."""
    folder = new_folder(family)
    make_model(family).save_pretrained(folder)
    return folder


@functools.cache
def with_idle_layer(family: str, layer: int) -> Path:
    """The same with a layer that adds nothing, so that the others alone are the whole model."""
    folder, model = new_folder(family), make_model(family)
    for name, weight in model.named_parameters():
        if f"layers.{layer}." in name and ("o_proj" in name or "down_proj" in name):
            weight.data.zero_()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def make_model(family: str) -> PreTrainedModel:
    """A model with attention that picks single tokens, so that its greedy output depends on all that it may see."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        mean, std = distribution(name, weight, gemma=family.startswith("gemma"))
        weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))
    return model.eval()


def distribution(name: str, weight: torch.Tensor, gemma: bool) -> tuple[float, float]:
    """Mean and standard deviation of a parameter of this name."""
    late = any(f"layers.{layer}." in name for layer in range(EXIT_LAYER, NUM_LAYERS))
    share = LATE if late else 1.0
    if name.endswith(".bias"):
        return 0.0, 0.3
    if weight.ndim == 1:  # norms; Gemma's multiply by 1 + weight, and those behind its sublayers say what these add
        one = 0.0 if gemma else 1.0
        if gemma and ".post_" in name:
            return 3.0 * share - 1.0, 0.1
        return (one + 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else one), 0.2
    std = weight.shape[1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return 0.0, std if gemma else 1.0
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return 0.0, 1.6 * std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 0.0, 3.0 * share * std
    return 0.0, std
