"""LoRA adapters with random weights for families.py's Llama, in PEFT's format, large enough to change its outputs."""

import functools
import json
from pathlib import Path

import torch
from families import NUM_LAYERS, SHAPE, VOCAB_SIZE
from safetensors.torch import save_file
from shortened import new_folder

RANK = 8
# Arguments of an engine. On a CPU vLLM 0.32 has a request without adapter run the one in the last slot, if another in
# its batch has one: that slot stays empty.
WITH_ADAPTERS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}


@functools.cache
def adapter(seed: int, has_head: bool = False) -> Path:
    """A folder with an adapter of every projection of every layer, and of the target's head; it is removed when the
    process ends."""
    folder = new_folder("adapter")
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    queries, keys = (SHAPE[name] * SHAPE["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    places = [(f"model.layers.{layer}.{name}", shape) for layer in range(NUM_LAYERS) for name, shape in shapes.items()]
    if has_head:
        places.append(("lm_head", (hidden, VOCAB_SIZE)))
    weights = {}
    for place, (num_in, num_out) in places:
        path = f"base_model.model.{place}"
        weights[f"{path}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator) * num_in**-0.5
        weights[f"{path}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator) * 0.5 * RANK**-0.5
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    targets = [name.partition(".")[2] for name in shapes] + ["lm_head"] * has_head
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    return folder
