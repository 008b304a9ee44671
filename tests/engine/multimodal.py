"""A tiny Qwen 2 VL with random weights, text and images, positions of three parts (M-RoPE), and what its processor
needs."""

import functools
import json
from pathlib import Path

import torch
from families import UNTIED, VOCAB_SIZE, distribution
from shortened import new_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen2VLConfig

IMAGE, VIDEO, VISION_START, VISION_END = range(VOCAB_SIZE - 4, VOCAB_SIZE)
SPECIAL = {
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}


@functools.cache
def vision_checkpoint() -> Path:
    """A folder with the model; it is removed when the process ends."""
    folder = new_folder("qwen2_vl")
    _model().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    image |= {"min_pixels": 28 * 28, "max_pixels": 112 * 112, "processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    return folder


@torch.no_grad()
def _model() -> torch.nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**UNTIED, **heads, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 64, "num_heads": 2, "hidden_size": UNTIED["hidden_size"], "mlp_ratio": 2}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, vision_end_token_id=VISION_END, **ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim <= 2:
            mean, std = distribution(name, weight, gemma=False)
            weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token."""
    words = {SPECIAL.get(token, f"w{token}"): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", additional_special_tokens=list(SPECIAL.values())
    )
