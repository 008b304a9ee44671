"""Widening of trained parts: what drafts for a model drafts the same for the wide one (widen.py), at its cost.

States of the wide model are those of the small one and zeros after them, so that every weight is padded with zeros.
The inner size of a jump, which is chosen freely, grows with the hidden size. H: hidden size, K: factor, W: K * H.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]


def padded(weight: Tensor, *shape: int) -> Tensor:
    """A weight in the low corner of zeros.

    >>> padded(torch.ones(1, 1), 1, 3)
    tensor([[1., 0., 0.]])
    """
    wide = weight.new_zeros(shape)
    wide[tuple(slice(size) for size in weight.shape)] = weight
    return wide


def norm(weight: Tensor, factor: int) -> Tensor:
    """Of an RMSNorm: the mean square over padded states is smaller by the factor."""
    return padded(weight / math.sqrt(factor), factor * len(weight))


def _exit_head(weights: Weights, factor: int) -> Weights:
    rows, hidden = weights["head.weight"].shape
    head = padded(weights["head.weight"], rows, factor * hidden)
    return {"norm.weight": norm(weights["norm.weight"], factor), "head.weight": head}


def _jump(weights: Weights, factor: int) -> Weights:
    hidden, (inner, _) = len(weights["norm.weight"]), weights["up.weight"].shape

    def of_both(weight: Tensor, rows: int) -> Tensor:
        """What reads two states of H reads two of W."""
        return torch.cat([padded(half, rows, factor * hidden) for half in weight.chunk(2, dim=1)], dim=1)

    return {
        "norm.weight": norm(weights["norm.weight"], factor),
        "mix.weight": of_both(weights["mix.weight"], factor * hidden),
        "up.weight": of_both(weights["up.weight"], factor * inner),
        "down.weight": padded(weights["down.weight"], factor * hidden, factor * inner),
    }


def _look_ahead(weights: Weights, factor: int) -> Weights:
    embeddings = weights["embeddings.weight"]
    return {"embeddings.weight": padded(embeddings, len(embeddings), factor * embeddings.shape[1])}


# By the file of the weights.
KINDS: dict[str, Callable[[Weights, int], Weights]] = {
    "exit_head.safetensors": _exit_head,
    "jump.safetensors": _jump,
    "look_ahead.safetensors": _look_ahead,
}


def wide_config(config: dict, factor: int, depth_factor: int) -> dict:
    """What a part was made for, of the wide model."""
    changes = {name: config[name] * factor for name in ("hidden_size", "inner_size") if name in config}
    changes |= {name: config[name] * depth_factor for name in ("late_layer", "num_layers") if name in config}
    for name in ("exit_layer", "early_layers"):
        if config.get(name):  # what layer n knew is there after the first of the layers that stand for it
            changes[name] = (config[name] - 1) * depth_factor + 1
    if "rms_norm_eps" in config:
        changes["rms_norm_eps"] = config["rms_norm_eps"] / factor
    return config | changes


def widen_part(source: Path, out: Path, factor: int, depth_factor: int) -> None:
    """Writes the part in a folder, widened, to another; ValueError if there is none."""
    names = [name for name in KINDS if (source / name).is_file()]
    if len(names) != 1 or not (source / "config.json").is_file():
        raise ValueError(f"--parts is {source}; allowed: folders of trained parts, with one of {', '.join(KINDS)}")
    [name] = names
    out.mkdir(parents=True)
    wide = {key: weight.contiguous() for key, weight in KINDS[name](load_file(source / name), factor).items()}
    save_file(wide, out / name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(wide_config(config, factor, depth_factor), indent=1) + "\n")
    if (source / "README.md").is_file():
        shutil.copy(source / "README.md", out)
