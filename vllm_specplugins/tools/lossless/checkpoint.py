"""A tiny Llama with random weights: of two layers, the first is a fair guess at both.

Its distributions are far from uniform and differ much from one context to the next, so that wrong sampling shows.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

VOCAB_SIZE = 10
MAX_MODEL_LEN = 64


def write_checkpoint(folder: Path, seed: int) -> LlamaForCausalLM:
    """Writes the model of this seed into a folder, without a tokenizer."""
    logging.disable_progress_bar()
    model = make_model(seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def make_model(seed: int) -> LlamaForCausalLM:
    """The model of a seed, in float32 on the CPU."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
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
