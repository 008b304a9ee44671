"""Parts that are widened with their model draft what they drafted before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from widen import widen, widened_config
from widen_parts import widen_part

from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.jump_head import JumpHead
from vllm_specplugins.proposers.heads.look_ahead import LookAhead
from vllm_specplugins.proposers.heads.trained import CONFIG_FILE, TrainedPart
from vllm_specplugins.proposers.learning.distillation import Guesser, jump_guesser
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.training.kinds import exit_guesser, look_ahead_guesser

HIDDEN, VOCAB, NUM_LAYERS, FACTOR, DEPTH = 32, 3072, 3, 4, 2
JUMP = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "inner_size": 8, "rms_norm_eps": 1e-5}
EXIT = {"exit_layer": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
PARTS: dict[str, tuple[type[TrainedPart], dict[str, Any]]] = {
    "jump over all layers": (JumpHead, {"early_layers": 0, "late_layer": 3, **JUMP}),
    "jump": (JumpHead, {"early_layers": 1, "late_layer": 2, **JUMP}),
    "exit head": (ExitHead, EXIT),
    "look-ahead": (LookAhead, {"exit_layer": 2, "hidden_size": HIDDEN, "num_embeddings": 2}),
}


def guesser(base: BaseModel, part: Any) -> Guesser:
    match part:
        case ExitHead():
            return exit_guesser(base, part)
        case JumpHead():
            return jump_guesser(base, part)
    return look_ahead_guesser(base, part)


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
    kind, config = PARTS[name]
    generator, own = torch.Generator().manual_seed(0), kind.Config(**config)
    shapes = kind(own).state_dict()
    weights = {key: 0.2 * torch.randn(like.shape, generator=generator) for key, like in shapes.items()}
    small = kind(own, weights)
    small.save(tmp_path / "small")
    widen_part(tmp_path / "small", tmp_path / "wide", FACTOR, DEPTH)
    row = [0, *range(100, 109)]
    said = []
    for base, part in zip(bases, (small, kind.load(tmp_path / "wide")), strict=True):
        [states] = base.hidden_states([row])
        said.append(torch.cat([guess.logits for guess in guesser(base, part)(states, 3)]))
    assert said[0].abs().max() > 0.1
    torch.testing.assert_close(said[0], said[1], atol=2e-3, rtol=2e-3)


def test_refused(tmp_path: Path) -> None:
    """In a sentence. Fails if a folder of something else is widened."""
    (tmp_path / CONFIG_FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"^--parts is .*; allowed: folders of trained parts, with one of "):
        widen_part(tmp_path, tmp_path / "out", 4, 1)
