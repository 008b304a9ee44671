"""Tiny EAGLE and EAGLE-3 heads with random weights for a Llama of families.py, in the format of published checkpoints,
and a Qwen 2 of families.py with a layer for multi-token prediction, in the format of MiMo's."""

import functools
import json
from pathlib import Path

import torch
from families import FAMILIES, checkpoint
from safetensors.torch import load_file, save_file
from shortened import new_folder

SHARPNESS = 3.0  # of the attention: its output depends on single tokens


@functools.cache
def eagle_head(method: str, family: str = "llama") -> Path:
    """A folder with a head for "eagle" or "eagle3"; it is removed when the process ends."""
    folder, target = new_folder(method), FAMILIES[family]
    config = {**target.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "dtype": "float32"}
    first = max(0, target.num_hidden_layers - 3)  # vLLM's choice needs a target of more layers
    config["eagle_aux_hidden_state_layer_ids"] = [first, first + 1, first + 2]
    (folder / "config.json").write_text(json.dumps(config))
    _save(_random(_shapes(method, family)), folder)
    return folder


@functools.cache
def parallel_head(method: str, family: str = "llama") -> Path:
    """A folder with a layer for "dflash" or "dspark": attention over projected states of the target, and for the latter
    what one token says of the next, and how sure it is; it is removed when the process ends."""
    folder, target = new_folder(method), FAMILIES[family]
    hidden, head, layers = target.hidden_size, target.head_dim, [0, target.num_hidden_layers // 2]
    kind = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[method]
    config = {**target.to_dict(), "architectures": [kind], "model_type": "qwen3", "dtype": "float32"}
    config |= {"num_hidden_layers": 1, "dflash_config": {"mask_token_id": 5, "target_layer_ids": layers}}
    shapes = {name: shape for name, shape in _shapes("eagle", family).items() if name != "fc.weight"}
    shapes |= {f"layers.0.self_attn.{name}_norm.weight": (head,) for name in "qk"}
    shapes |= {f"{name}norm.weight": (hidden,) for name in ("hidden_", "", "layers.0.input_layer")}
    if method == "dspark":
        config |= {"markov_rank": (rank := 8), "enable_confidence_head": True}
        shapes |= {"confidence_head.proj.weight": (1, hidden), "confidence_head.proj.bias": (1,)}
        shapes |= {f"markov_head.markov_{part}.weight": (target.vocab_size, rank) for part in ("w1", "w2")}
    (folder / "config.json").write_text(json.dumps(config))
    _save(_random({**shapes, "fc.weight": (hidden, 2 * hidden)}), folder)
    return folder


@functools.cache
def mtp_model(family: str = "qwen2") -> Path:
    """A folder with a target whose checkpoint holds a layer for `mtp`; it is removed when the process ends."""
    folder, plain = new_folder("mimo"), checkpoint(family)
    config = json.loads((plain / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(plain / "model.safetensors")
    layer = "model.mtp_layers.0."
    added = {
        layer + name.removeprefix("model.layers.0."): tuple(weight.shape)
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    hidden = config["hidden_size"]
    added |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
    added[f"{layer}input_proj.weight"] = (hidden, 2 * hidden)
    _save({**weights, **_random(added)}, folder)
    return folder


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
            continue
        std = shape[1] ** -0.5 * (SHARPNESS if "_proj" in name else 1.0)
        weights[name] = std * torch.randn(shape, generator=generator)
    return weights


def _save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(method: str, family: str) -> dict[str, tuple[int, ...]]:
    config = FAMILIES[family]
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
