"""The file format of a trained exit head: what is read is what was written, and nothing broken gets in."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.exit_head import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    ExitHead,
    ExitHeadConfig,
    check_exit_head,
)

SIZES = {"exit_layer": 2, "hidden_size": 8, "vocab_size": 11}


def random_head(rank: int = 0) -> ExitHead:
    config = ExitHeadConfig(**SIZES, rank=rank, rms_norm_eps=1e-5)
    generator = torch.Generator().manual_seed(0)
    return ExitHead(config, {name: torch.randn(shape, generator=generator) for name, shape in config.shapes().items()})


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_round_trip(tmp_path: Path, rank: int) -> None:
    """Kills: a weight that is not written, not read, or written under a mode that other users cannot read."""
    head = random_head(rank)
    head.save(tmp_path / "new" / "folder")
    check_exit_head(tmp_path / "new" / "folder", **SIZES)
    again = ExitHead.load(tmp_path / "new" / "folder")
    hidden_states = torch.randn(5, 8)
    assert again.config == head.config
    assert torch.equal(again.logits(hidden_states), head.logits(hidden_states))
    mode = (tmp_path / "new" / "folder" / WEIGHTS_FILE).stat().st_mode
    assert mode & stat.S_IRGRP == (tmp_path / "new" / "folder" / CONFIG_FILE).stat().st_mode & stat.S_IRGRP


def test_low_rank_is_a_product(tmp_path: Path) -> None:
    """Kills: down and up in the wrong order, or a norm that is left out."""
    head, hidden_states = random_head(3), torch.randn(5, 8, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in head.weights.items()}
    normed = hidden_states * (hidden_states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["norm.weight"]
    expected = normed @ (weights["up.weight"] @ weights["down.weight"]).T
    assert torch.allclose(head.logits(hidden_states.float()).double(), expected, atol=1e-5)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewritten(**changes: object) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        raw = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**raw, **changes}))

    return rewrite


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])


BROKEN = {
    "no config": (without(CONFIG_FILE), "a folder with a readable config.json, not one without it"),
    "no weights": (without(WEIGHTS_FILE), "a folder with exit_head.safetensors, not one without it"),
    "a model's config": (lambda folder: (folder / CONFIG_FILE).write_text("{}"), "a head's folder"),
    "no JSON": (lambda folder: (folder / CONFIG_FILE).write_bytes(b"\xff{"), "a readable config.json"),
    "a list": (lambda folder: (folder / CONFIG_FILE).write_text("[1]"), "a head's folder"),
    "truncated": (truncated, "a whole exit_head.safetensors, not one that cannot be read"),
    "no safetensors": (lambda folder: (folder / WEIGHTS_FILE).write_text("x"), "a whole exit_head.safetensors"),
    "other layer": (rewritten(exit_layer=1), "a head whose exit_layer is 2, not 1"),
    "other hidden size": (rewritten(hidden_size=9), "a head whose hidden_size is 8, not 9"),
    "other vocabulary": (rewritten(vocab_size=12), "a head whose vocab_size is 11, not 12"),
    "other rank": (rewritten(rank=4), r"down.weight of shape \[4, 8\], not nothing"),
    "negative rank": (rewritten(rank=-1), "a number from 0 on, not -1"),
    "true": (rewritten(exit_layer=True), "a number from 0 on, not True"),
    "no number": (rewritten(rms_norm_eps="small"), "a number from 0 on, not 'small'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused(tmp_path: Path, name: str) -> None:
    """Each with its sentence. Kills: a check that is left out, or a traceback instead."""
    damage, words = BROKEN[name]
    random_head().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=rf"^early_exit: exit_head must be .*{words}.*\.$"):
        check_exit_head(tmp_path, **SIZES)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^early_exit: exit_head must be .*not one without it .*\.$"):
        check_exit_head(tmp_path / "nowhere", **SIZES)
