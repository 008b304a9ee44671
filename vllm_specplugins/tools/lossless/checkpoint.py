"""A tiny Llama with random weights: of two layers, the first is a fair guess at both.

Its distributions are far from uniform and differ much from one context to the next, so that wrong sampling shows.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig

VOCAB_SIZE = 10
MAX_MODEL_LEN = 64
HIDDEN_SIZE, NUM_LAYERS = 64, 2


def write_checkpoint(folder: Path, seed: int) -> LlamaForCausalLM:
    """Writes the model of this seed into a folder, without a tokenizer."""
    logging.disable_progress_bar()
    model = make_model(seed)
    model.save_pretrained(folder)
    return model


def write_parts(folder: Path, seed: int) -> None:
    """Writes what drafts for such a model into `jump` and `look_ahead`, random, and `draft_model` and `eagle`, of its
    first layer."""
    model = make_model(seed)
    _write_eagle(folder / "eagle", model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    model.save_pretrained(folder / "draft_model")
    generator = torch.Generator().manual_seed(seed)
    config = JumpHeadConfig(
        early_layers=1, late_layer=1, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, inner_size=8, rms_norm_eps=1e-6
    )
    shapes = JumpHead(config).state_dict()
    weights = {name: 0.05 * torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
    JumpHead(config, weights | {"norm.weight": torch.ones(HIDDEN_SIZE)}).save(folder / "jump")
    embeddings = {"embeddings.weight": 0.2 * torch.randn(1, HIDDEN_SIZE, generator=generator)}
    ahead = LookAheadConfig(exit_layer=1, hidden_size=HIDDEN_SIZE, num_embeddings=1)
    LookAhead(ahead, embeddings).save(folder / "look_ahead")


def _write_eagle(folder: Path, model: LlamaForCausalLM) -> None:
    """A head that sees of the target's state a tenth, in the format of published ones."""
    folder.mkdir()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    same = torch.eye(HIDDEN_SIZE)
    parts = model.model.layers[0].state_dict()
    layer = {f"layers.0.{name}": parts[name] for name in parts if not name.startswith("input_layernorm")}
    weights = {**layer, "fc.weight": torch.cat((same, 0.1 * same), dim=1)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def make_model(seed: int) -> LlamaForCausalLM:
    """The model of a seed, in float32 on the CPU."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.3 if name.startswith("lm_head") else 0.2, generator=generator)
    return model.eval()
