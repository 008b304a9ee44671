"""Parts that are widened with their model draft what they drafted before."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))
from widen import widen, widened_config
from widen_parts import widen_part

from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.look_ahead import LookAheadConfig, load_look_ahead
from vllm_specplugins.proposers.heads.trained import CONFIG_FILE
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.training.exit_head import TrainedExitHead
from vllm_specplugins.tools.training.jump import TrainedJump
from vllm_specplugins.tools.training.look_ahead import TrainedLookAhead

HIDDEN, VOCAB, NUM_LAYERS, FACTOR, DEPTH = 32, 3072, 3, 4, 2


def jump(early_layers: int, late_layer: int) -> Any:
    config = JumpHeadConfig(
        early_layers=early_layers, late_layer=late_layer, num_layers=NUM_LAYERS, hidden_size=HIDDEN, inner_size=8,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    return TrainedJump(JumpHead(config, random(config.shapes())))


def exit_head(rank: int) -> Any:
    config = ExitHeadConfig(exit_layer=2, hidden_size=HIDDEN, vocab_size=VOCAB, rank=rank, rms_norm_eps=1e-5)
    return TrainedExitHead(ExitHead(config, random(config.shapes())))


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# A part, and how it is read again.
PARTS: dict[str, tuple[Any, Any]] = {
    "jump over all layers": (jump(0, 3), lambda folder: TrainedJump(JumpHead.load(folder))),
    "jump": (jump(1, 2), lambda folder: TrainedJump(JumpHead.load(folder))),
    "exit head": (exit_head(0), lambda folder: TrainedExitHead(ExitHead.load(folder))),
    "exit head of a rank": (exit_head(4), lambda folder: TrainedExitHead(ExitHead.load(folder))),
    "look-ahead": (
        TrainedLookAhead(LookAheadConfig(exit_layer=2, hidden_size=HIDDEN, num_embeddings=2), torch.randn(2, HIDDEN)),
        lambda folder: TrainedLookAhead(
            LookAheadConfig(exit_layer=3, hidden_size=FACTOR * HIDDEN, num_embeddings=2), load_look_ahead(folder)
        ),
    ),
}


@pytest.fixture(scope="module")
def bases(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BaseModel, BaseModel]:
    small = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(1)
    widen(small, widened_config(small.config, FACTOR, 80, DEPTH)).save_pretrained(folder)
    return BaseModel.load(str(tiny_model), "cpu"), BaseModel.load(str(folder), "cpu")


@pytest.mark.parametrize("name", PARTS)
def test_the_same_drafts(bases: tuple[BaseModel, BaseModel], name: str, tmp_path: Path) -> None:
    """Fails if a norm is not rescaled, a weight padded on the wrong side, or a layer counted as one."""
    part, load = PARTS[name]
    part.save(tmp_path / "small", torch.float32)
    widen_part(tmp_path / "small", tmp_path / "wide", FACTOR, DEPTH)
    row = [0, *range(100, 109)]
    said = []
    for base, own in zip(bases, (part, load(tmp_path / "wide")), strict=True):
        [states] = base.hidden_states([row])
        said.append(torch.cat([guess.logits for guess in own.guesses(base, states, 3)]))
    assert said[0].abs().max() > 0.1
    torch.testing.assert_close(said[0], said[1], atol=2e-3, rtol=2e-3)


def test_refused(tmp_path: Path) -> None:
    """In a sentence. Fails if a folder of something else is widened."""
    (tmp_path / CONFIG_FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"^--parts is .*; allowed: folders of trained parts, with one of "):
        widen_part(tmp_path, tmp_path / "out", 4, 1)
