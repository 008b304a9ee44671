"""Heads of jumps, for the demo model or for another of given sizes."""

from pathlib import Path
from typing import Any

import torch
from conftest import NUM_LAYERS

from vllm_specplugins.proposers.jump_head import JumpHead, JumpHeadConfig

HIDDEN, K = 256, 4


def write_head(folder: Path, early_layers: int, late_layer: int, scale: float, **other: int) -> dict[str, Any]:
    """The configuration of a jump whose head adds random numbers of this scale to the early state."""
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, **other}
    config = JumpHeadConfig(early_layers=early_layers, late_layer=late_layer, inner_size=16, rms_norm_eps=1e-5, **sizes)
    generator = torch.Generator().manual_seed(0)
    weights = {name: scale * torch.randn(shape, generator=generator) for name, shape in config.shapes().items()}
    JumpHead(config, weights | {"norm.weight": torch.ones(config.hidden_size)}).save(folder)
    return {"method": "jump", "head": str(folder), "num_speculative_tokens": K}
