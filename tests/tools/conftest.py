"""A tiny Llama with the demo model's tokenizer, and text for it."""

import os
import random
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "window", "table", "return", "import"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """More only wait for each other in a model this small; and the weights of two runs must be the same bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, of which the later ones change what the first leaves: its exit is bad until a head is trained."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3072, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model.lm_head.weight.mul_(50)
        for layer in model.model.layers[1:]:
            layer.mlp.down_proj.weight.mul_(200)
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of random words."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    files = [folder / "one.txt", folder / "two.txt"]
    for file in files:
        file.write_text(" ".join(rng.choices(WORDS, k=1500)))
    return files
