"""Trained parts of every kind: a damaged folder, or one of another kind, is one sentence."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig, check_exit_head
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig, check_jump
from vllm_specplugins.proposers.heads.look_ahead import LookAheadConfig, check_look_ahead, save_look_ahead
from vllm_specplugins.proposers.heads.medusa_heads import check_medusa

HIDDEN, VOCAB, NUM_LAYERS, K = 8, 11, 6, 3


def write_exit_head(folder: Path) -> None:
    config = ExitHeadConfig(exit_layer=2, hidden_size=HIDDEN, vocab_size=VOCAB, rank=0, rms_norm_eps=1e-5)
    ExitHead(config, {name: torch.ones(shape) for name, shape in config.shapes().items()}).save(folder)


def write_jump(folder: Path) -> None:
    config = JumpHeadConfig(
        early_layers=0, late_layer=6, num_layers=NUM_LAYERS, hidden_size=HIDDEN, inner_size=4, rms_norm_eps=1e-5
    )
    JumpHead(config, {name: torch.ones(shape) for name, shape in config.shapes().items()}).save(folder)


def write_look_ahead(folder: Path) -> None:
    config = LookAheadConfig(exit_layer=2, hidden_size=HIDDEN, num_embeddings=K - 1)
    save_look_ahead(folder, config, torch.ones(K - 1, HIDDEN))


def write_medusa(folder: Path) -> None:
    folder.mkdir()
    tensors = {f"blocks.{head}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(K)}
    save_file(tensors, folder / "model.safetensors")


# field, who writes it, who checks it
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "early_exit: exit_head": (
        write_exit_head,
        lambda folder: check_exit_head(folder, exit_layer=2, hidden_size=HIDDEN, vocab_size=VOCAB),
    ),
    "jump: head": (write_jump, lambda folder: check_jump(folder, num_layers=NUM_LAYERS, hidden_size=HIDDEN)),
    "early_exit: look_ahead": (
        write_look_ahead,
        lambda folder: check_look_ahead(folder, exit_layer=2, hidden_size=HIDDEN, num_draft=K),
    ),
    "medusa: heads": (
        write_medusa,
        lambda folder: check_medusa(folder, hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=K),
    ),
}


def weights(folder: Path) -> Path:
    [path] = folder.glob("*.safetensors")
    return path


def spoil(folder: Path, value: float) -> None:
    """One number of each tensor."""
    tensors = load_file(weights(folder))
    for tensor in tensors.values():
        tensor.view(-1)[-1] = value
    save_file(tensors, weights(folder))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no weights": lambda folder: weights(folder).unlink(),
    "no bytes": lambda folder: weights(folder).write_bytes(b""),
    "cut short": lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:-20]),
    "a header beyond the end": lambda folder: weights(folder).write_bytes(b"\xff" * 64),
    "text": lambda folder: weights(folder).write_text("version https://git-lfs.github.com/spec/v1\n"),
    "no tensors": lambda folder: save_file({}, weights(folder)),
    "NaN": lambda folder: spoil(folder, math.nan),
    "infinity": lambda folder: spoil(folder, -math.inf),
    "other tensors": lambda folder: save_file({"weight": torch.ones(2, 2)}, weights(folder)),
    "whole numbers": lambda folder: save_file(
        {name: torch.ones(1, dtype=torch.int64) for name in ("norm.weight", "embeddings.weight")}, weights(folder)
    ),
}


@pytest.mark.parametrize("field", KINDS)
def test_whole(field: str, tmp_path: Path) -> None:
    """Fails if a part is refused that is as it should be: the other tests would say nothing."""
    write, check = KINDS[field]
    write(tmp_path / "part")
    check(tmp_path / "part")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("field", KINDS)
def test_damaged(field: str, damage: str, tmp_path: Path) -> None:
    """Fails if a kind of damage is not looked for, or leaves a traceback."""
    write, check = KINDS[field]
    write(tmp_path / "part")
    DAMAGE[damage](tmp_path / "part")
    with pytest.raises(ConfigError, match=rf"^{field} must be [^\n]*, not [^\n]*\.$"):
        check(tmp_path / "part")


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("field", KINDS)
def test_foreign(field: str, other: str, tmp_path: Path) -> None:
    """Fails if a part is taken for one of another kind."""
    if field == other:
        return
    KINDS[other][0](tmp_path / "part")
    with pytest.raises(ConfigError, match=rf"^{field} must be [^\n]*, not [^\n]*\.$"):
        KINDS[field][1](tmp_path / "part")
