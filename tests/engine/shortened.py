"""Folders of checkpoints that are made for a test, and a model's first layers."""

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file


def new_folder(name: str) -> Path:
    """It is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"specplugins-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def first_layers(model: Path, num_layers: int) -> Path:
    """A checkpoint of a model's first layers, in a new folder; the demo model is trained to be usable so."""
    out = new_folder("model")
    shutil.copytree(model, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    dropped = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
    weights = load_file(out / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def more_layers(model: Path, num_layers: int) -> Path:
    """A checkpoint of a model with layers at its end that add nothing, in a new folder."""
    out = new_folder("model")
    shutil.copytree(model, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    weights = load_file(out / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    own = {name.removeprefix(last): tensor for name, tensor in weights.items() if name.startswith(last)}
    for layer in range(config["num_hidden_layers"], num_layers):
        for name, tensor in own.items():
            adds = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"model.layers.{layer}.{name}"] = tensor * 0 if adds else tensor.clone()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
