"""Trained parts of every kind: what is read is what was written; a damaged folder, or another kind's, is a sentence."""

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.jump_head import JumpHead, check_jump
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, check_look_ahead
from vllm_specplugins.proposers.heads.medusa_heads import check_medusa
from vllm_specplugins.proposers.heads.trained import CONFIG_FILE, TrainedPart

HIDDEN, VOCAB, NUM_LAYERS, K = 8, 11, 6, 3
EXIT = {"exit_layer": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
JUMP = {
    "early_layers": 0, "late_layer": 4, "num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "inner_size": 4,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
AHEAD = {"exit_layer": 2, "hidden_size": HIDDEN, "num_embeddings": K - 1}
PARTS: dict[str, tuple[type[TrainedPart], dict[str, Any]]] = {
    "exit head": (ExitHead, EXIT),
    "jump": (JumpHead, JUMP),
    "look-ahead": (LookAhead, AHEAD),
}


def random_part(kind: type[TrainedPart], config: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = kind(kind.Config(**config)).state_dict()
    weights = {name: torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
    return kind(kind.Config(**config), weights)


def write_medusa(folder: Path) -> None:
    folder.mkdir()
    tensors = {f"blocks.{head}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(K)}
    save_file(tensors, folder / "model.safetensors")


# field, who writes it, who checks it
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "early_exit: exit_head": (
        lambda folder: random_part(ExitHead, EXIT).save(folder),
        lambda folder: ExitHead.check(folder, exit_layer=2, hidden_size=HIDDEN, vocab_size=VOCAB),
    ),
    "jump: head": (
        lambda folder: random_part(JumpHead, JUMP).save(folder),
        lambda folder: check_jump(folder, num_layers=NUM_LAYERS, hidden_size=HIDDEN),
    ),
    "early_exit: look_ahead": (
        lambda folder: random_part(LookAhead, AHEAD).save(folder),
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


def integers(folder: Path) -> None:
    tensors = load_file(weights(folder))
    save_file({name: torch.ones(tensor.shape, dtype=torch.int64) for name, tensor in tensors.items()}, weights(folder))


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
}


def rewritten(**changes: object) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        raw = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**raw, **changes}))

    return rewrite


def factored(folder: Path) -> None:
    """As version 0.1.0 wrote heads of a rank."""
    save_file(
        {"norm.weight": torch.ones(8), "down.weight": torch.ones(4, 8), "up.weight": torch.ones(11, 4)}, weights(folder)
    )


# Of an exit head, or of a jump: what is done to the folder, and what the sentence says.
REFUSED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no folder": ("exit_head", lambda folder: folder.rename(folder.parent / "away"), "No such file"),
    "no config": ("exit_head", lambda folder: (folder / CONFIG_FILE).unlink(), "with the config.json of a head, not"),
    "no JSON": ("exit_head", lambda folder: (folder / CONFIG_FILE).write_bytes(b"\xff{"), "JSON is malformed"),
    "a model's config": (
        "exit_head",
        lambda folder: (folder / CONFIG_FILE).write_text("{}"),
        "required field `exit_layer`",
    ),
    "a list": ("exit_head", lambda folder: (folder / CONFIG_FILE).write_text("[1]"), "Expected `object`"),
    "no weights": ("exit_head", DAMAGE["no weights"], "a folder with exit_head.safetensors, not one without it"),
    "truncated": ("exit_head", DAMAGE["cut short"], "a whole exit_head.safetensors, not one that cannot be read"),
    "whole numbers": ("exit_head", integers, "norm.weight of F16, BF16, F32, F64, not I64"),
    "other layer": ("exit_head", rewritten(exit_layer=1), "a head whose exit_layer is 2, not 1"),
    "other size": ("exit_head", rewritten(hidden_size=9), "a head whose hidden_size is 8, not 9"),
    "other vocabulary": ("exit_head", rewritten(vocab_size=12), "a head whose vocab_size is 11, not 12"),
    "factors of a head": ("exit_head", factored, r"head.weight of shape \[11, 8\], not nothing"),
    "a negative number": ("exit_head", rewritten(rms_norm_eps=-1), "`float` > 0.0 - at `..rms_norm_eps`"),
    "a norm that divides by zero": ("jump", rewritten(rms_norm_eps=0), "`float` > 0.0 - at `..rms_norm_eps`"),
    "a norm that divides by much": ("exit_head", rewritten(rms_norm_eps=1e9), "`float` <= 1.0 - at `..rms_norm_eps`"),
    "a layer before the first": ("exit_head", rewritten(exit_layer=-1), "`int` >= 0 - at `..exit_layer`"),
    "true": ("exit_head", rewritten(exit_layer=True), "`int`, got `bool` - at `..exit_layer`"),
    "no number": ("exit_head", rewritten(rms_norm_eps="small"), "`float`, got `str` - at `..rms_norm_eps`"),
    "other depth": ("jump", rewritten(num_layers=7), "whose num_layers is 6, not 7"),
    "other inner size": ("jump", rewritten(inner_size=5), r"up.weight of shape \[5, 16\], not \[4, 16\]"),
    "backwards": ("jump", rewritten(early_layers=5), "whose late_layer is from early_layers to 6, not 4"),
    "after the end": ("jump", rewritten(late_layer=7), "whose late_layer is from early_layers to 6, not 7"),
}


@pytest.mark.parametrize("name", PARTS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    """Kills: a weight that is not written, not read, or written under a mode that other users cannot read."""
    kind, config = PARTS[name]
    part, folder = random_part(kind, config), tmp_path / "new" / "folder"
    part.save(folder)
    again = kind.load(folder)
    assert again.config == part.config == kind.check(folder, hidden_size=HIDDEN)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in part.state_dict().items())
    mode = weights(folder).stat().st_mode
    assert mode & stat.S_IRGRP == (folder / CONFIG_FILE).stat().st_mode & stat.S_IRGRP


def test_exit_head() -> None:
    """Against its formula in float64. Kills: a norm that is left out."""
    head, hidden_states = random_part(ExitHead, EXIT), torch.randn(5, 8, dtype=torch.float64)
    own = {name: tensor.double() for name, tensor in head.state_dict().items()}
    normed = hidden_states * (hidden_states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * own["norm.weight"]
    expected = normed @ own["head.weight"].T
    assert torch.allclose(head.logits(hidden_states.float()).double(), expected, atol=1e-5)


def test_jump() -> None:
    """Likewise. Fails if the two inputs change places, or one is normed that is not, or not."""
    head = random_part(JumpHead, JUMP)
    early, last = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    own = {name: tensor.double() for name, tensor in head.state_dict().items()}
    normed = early * (early.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * own["norm.weight"]
    both = torch.cat((normed, last), -1)
    inner = both @ own["up.weight"].T
    expected = early + both @ own["mix.weight"].T + inner * inner.sigmoid() @ own["down.weight"].T
    assert torch.allclose(head.states(early.float(), last.float()).double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    """Each with its sentence. Kills: a check that is left out, or a traceback instead."""
    kind, damage, words = REFUSED[name]
    field = "jump: head" if kind == "jump" else "early_exit: exit_head"
    write, check = KINDS[field]
    write(tmp_path / "part")
    damage(tmp_path / "part")
    with pytest.raises(ConfigError, match=rf"^{field} must be [^\n]*{words}[^\n]*\.$"):
        check(tmp_path / "part")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("field", KINDS)
def test_damaged(field: str, damage: str, tmp_path: Path) -> None:
    """Fails if a kind of damage is not looked for, or leaves a traceback."""
    write, check = KINDS[field]
    write(tmp_path / "part")
    check(tmp_path / "part")
    DAMAGE[damage](tmp_path / "part")
    with pytest.raises(ConfigError, match=rf"^{field} must be [^\n]*, not [^\n]*\.$"):
        check(tmp_path / "part")


@pytest.mark.parametrize(("field", "other"), [(field, other) for field in KINDS for other in KINDS if field != other])
def test_foreign(field: str, other: str, tmp_path: Path) -> None:
    """Fails if a part is taken for one of another kind."""
    KINDS[other][0](tmp_path / "part")
    with pytest.raises(ConfigError, match=rf"^{field} must be [^\n]*, not [^\n]*\.$"):
        KINDS[field][1](tmp_path / "part")
