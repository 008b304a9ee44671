"""Trained parts with chosen weights, for the demo model or for another of given sizes."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from cases import early_exit
from conftest import DEMO_MODEL, NUM_LAYERS
from safetensors.torch import load_file, save_file

from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.learning.pace import Pace

HIDDEN, K = 256, 4


def write_head(folder: Path, early_layers: int, late_layer: int, scale: float, **other: int) -> dict[str, Any]:
    """The configuration of a jump whose head adds random numbers of this scale to the early state."""
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, **other}
    config = JumpHeadConfig(early_layers=early_layers, late_layer=late_layer, inner_size=16, rms_norm_eps=1e-5, **sizes)
    generator = torch.Generator().manual_seed(0)
    shapes = JumpHead(config).state_dict()
    weights = {name: scale * torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
    JumpHead(config, weights | {"norm.weight": torch.ones(config.hidden_size)}).save(folder)
    return {"method": "jump", "head": str(folder), "num_speculative_tokens": K}


def learning(folder: Path, method: str = "jump", **config: Any) -> dict[str, Any]:
    """A part that knows nothing, and learns."""
    if method == "medusa":
        own = medusa(folder, num_draft=2)
    elif method in ("early_exit", "last layer"):
        vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
        layers = (NUM_LAYERS - 1,) if method == "last layer" else None
        known = {"hidden_size": HIDDEN, "vocab_size": vocab_size, "rms_norm_eps": 1e-5}
        sizes = ExitHeadConfig(exit_layer=1, layers=layers, **known)
        weight = 0.02 * torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
        ExitHead(sizes, {"norm.weight": torch.ones(HIDDEN), "head.weight": weight}).save(folder)
        own = {**early_exit(1, K), "layers": layers, "exit_head": str(folder)}
    else:
        own = write_head(folder, 0, NUM_LAYERS, 0.02)
    return {**own, "learn": config or True}


def learner_of(llm: Any) -> Any:
    """The engine's; it learns in this thread, when it is asked to, and no more in its own."""
    learner = llm.llm_engine.model_executor.driver_worker.worker._session.barrier.proposer.training
    if learner._thread.ident is None:
        learner._thread = Thread(target=lambda: None)
        learner._thread.start()
        learner.trainer._pace = Pace(1, 1)
    return learner


def swaps_weights(patch: pytest.MonkeyPatch, scale: float = 0.05) -> list[int]:
    """Before every other step noise takes the place of what learns; the list says how many steps there were."""
    num_steps, step = [0], Learner.step

    def swapped(self: Learner) -> None:
        num_steps[0] += 1
        if num_steps[0] % 2:
            self._promoted, self._is_new = [scale * torch.randn_like(own) for own in self._part.parameters()], True
        step(self)

    patch.setattr(Learner, "step", swapped)
    return num_steps


def with_embeddings(folder: Path, layer: int, num_draft: int, **other: int) -> dict[str, Any]:
    """An exit that drafts by one pass, with embeddings of some tokens."""
    table = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    sizes = {"exit_layer": layer, "hidden_size": table.shape[1], "num_embeddings": num_draft - 1, **other}
    weights = {"embeddings.weight": torch.full((sizes["num_embeddings"], sizes["hidden_size"]), 0.01)}
    LookAhead(LookAheadConfig(**sizes), weights).save(folder)
    return {**early_exit(layer, num_draft), "look_ahead": str(folder)}


def medusa(folder: Path, hidden_size: int = HIDDEN, num_draft: int = K, **tensors: torch.Tensor) -> dict[str, Any]:
    """Heads that change nothing, with the target's own: each drafts the newest token again."""
    blocks = {f"blocks.{head}.layers.0.weight": torch.zeros(hidden_size, hidden_size) for head in range(num_draft)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(blocks | tensors, folder / "model.safetensors")
    return {"method": "medusa", "heads": str(folder), "num_speculative_tokens": num_draft}
