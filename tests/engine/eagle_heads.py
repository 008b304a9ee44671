"""Tiny EAGLE and EAGLE-3 heads with random weights for families.py's Llama, in the format of published checkpoints."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from families import FAMILIES
from safetensors.torch import save_file

SHARPNESS = 3.0  # of the attention: its output depends on single tokens


@functools.cache
def eagle_head(method: str) -> Path:
    """A folder with a head for "eagle" or "eagle3"; it is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"specplugins-{method}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = FAMILIES["llama"]
    config = {**target.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "dtype": "float32"}
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]  # vLLM's choice needs a target of more layers
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in _shapes(method).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        std = shape[1] ** -0.5 * (SHARPNESS if "_proj" in name else 1.0)
        weights[name] = std * torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(method: str) -> dict[str, tuple[int, ...]]:
    config = FAMILIES["llama"]
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    is_third = method == "eagle3"
    layer, width = ("midlayer", 2 * hidden) if is_third else ("layers.0", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (3 if is_third else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (queries, width),
        f"{layer}.self_attn.k_proj.weight": (keys, width),
        f"{layer}.self_attn.v_proj.weight": (keys, width),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    if is_third:
        norms = {f"{layer}.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
        shapes |= {**norms, "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return shapes
