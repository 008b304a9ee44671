"""Jumps: what is read is what was written, what a jump computes and is fed, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.kernels.rejection.drafts import coupled_sample

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig, check_jump
from vllm_specplugins.target import Sampling, Target

HIDDEN, VOCAB, NUM_LAYERS, NUM_REQS = 8, 11, 6, 4
SIZES = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN}


def random_head(early_layers: int = 0) -> JumpHead:
    config = JumpHeadConfig(early_layers=early_layers, late_layer=4, inner_size=3, rms_norm_eps=1e-5, **SIZES)
    generator = torch.Generator().manual_seed(0)
    return JumpHead(config, {name: torch.randn(shape, generator=generator) for name, shape in config.shapes().items()})


class Forward:
    """A target whose layers add their place to a state and leave a trace of what they ran on."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.positions: list[list[int]] = []

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids.long()]

    def hidden_states(self, end: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool) -> torch.Tensor:
        assert not normed
        return self.table[token_ids.long()] * end + positions[:, None]

    def hidden_states_of(self, first: int, end: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert (first, end) == (4, NUM_LAYERS)
        self.positions.append(positions.tolist())
        return torch.tanh(states + positions[:, None])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.head.T

    def argmax(self, states: torch.Tensor) -> torch.Tensor:
        return self.logits(states).argmax(-1)


def test_round_trip(tmp_path: Path) -> None:
    """Fails if a weight is not written, or not read."""
    head = random_head()
    head.save(tmp_path / "new")
    assert check_jump(tmp_path / "new", **SIZES) == head.config
    early, last = torch.randn(2, 5, HIDDEN)
    assert torch.equal(JumpHead.load(tmp_path / "new").states(early, last), head.states(early, last))


def test_states() -> None:
    """Against its formula in float64. Fails if the two inputs change places, or one is normed that is not, or not."""
    head = random_head()
    early, last = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in head.weights.items()}
    normed = early * (early.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["norm.weight"]
    both = torch.cat((normed, last), -1)
    inner = both @ weights["up.weight"].T
    inner = inner * inner.sigmoid()
    expected = early + both @ weights["mix.weight"].T + inner @ weights["down.weight"].T
    assert torch.allclose(head.states(early.float(), last.float()).double(), expected, atol=1e-5)


@pytest.mark.parametrize("early_layers", [0, 2])
@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_drafts(method: str, early_layers: int, tmp_path: Path) -> None:
    """Each token from the one before and from the state that it was said from, one place further on, up to the end of
    the context. Fails if a state or a token is one step late, or if places or noise are off by one."""
    head = random_head(early_layers)
    head.save(tmp_path)
    raw = {"method": "jump", "head": str(tmp_path), "num_speculative_tokens": 3, "draft_sample_method": method}
    proposer = build_proposer(parse_config(raw), ProposerContext(VOCAB, 21, 8, 3, lambda text: []))
    heat, seeds, lengths = torch.tensor([0.0, 0.7, 1.0, 1.5]), torch.arange(4) * 31, torch.tensor([3, 9, 20, 5])
    verified, forward = Verified(heat, seeds), Forward()
    newest, states = torch.tensor([1, 4, 9, 0], dtype=torch.int32), torch.randn(NUM_REQS, HIDDEN)
    target = Target(forward, newest, lengths, states, Sampling(heat, seeds, verified))  # type: ignore[arg-type]
    wanted = np.array([3, 0, 1, 3], np.int32)
    draft = proposer.propose(DraftBatch(list("abcd"), (), wanted, [{}] * NUM_REQS, target))
    assert draft.num_draft.tolist() == wanted.tolist() and draft.token_ids.shape == (NUM_REQS, 3)
    assert forward.positions == [[2, 8, 19, 4], [3, 9, 20, 5], [4, 10, 20, 6]]
    assert lengths.tolist() == [3, 9, 20, 5], "the engine's own"
    tokens = newest
    for step, places in enumerate(forward.positions):
        at = torch.tensor(places)
        early = forward.hidden_states(2, tokens, at, False) if early_layers else forward.embeddings(tokens)
        states = torch.tanh(head.states(early, states) + at[:, None])
        logits = forward.logits(states)
        if method == "greedy":
            assert torch.equal(draft.token_ids[:, step].long(), logits.argmax(-1))
        elif method == "coupled":
            assert torch.equal(draft.token_ids[:, step].long(), coupled_sample(logits, at + 1, verified))
        else:
            torch.testing.assert_close(draft.logits[:, step], logits)
        tokens = draft.token_ids[:, step]


def rewritten(**changes: object) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return rewrite


def cut(folder: Path) -> None:
    path = folder / "jump.safetensors"
    path.write_bytes(path.read_bytes()[:200])


DAMAGE: dict[str, Any] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "a readable config.json"),
    "no weights": (lambda folder: (folder / "jump.safetensors").unlink(), "a folder with jump.safetensors"),
    "an exit head": (lambda folder: (folder / "config.json").write_text('{"exit_layer": 1}'), "one of something else"),
    "cut short": (cut, "a whole jump.safetensors, not one that cannot be read"),
    "other model": (rewritten(hidden_size=9), "whose hidden_size is 8, not 9"),
    "other depth": (rewritten(num_layers=7), "whose num_layers is 6, not 7"),
    "other inner size": (rewritten(inner_size=4), r"up.weight of shape \[4, 16\], not \[3, 16\]"),
    "backwards": (rewritten(early_layers=5), "whose late_layer is from early_layers to 6, not 4"),
    "behind the end": (rewritten(late_layer=7), "whose late_layer is from early_layers to 6, not 7"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_refused(name: str, tmp_path: Path) -> None:
    """Each with its sentence. Fails if a check is left out, or if there is a traceback instead."""
    damage, words = DAMAGE[name]
    random_head().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=rf"^jump: head must be [^\n]*{words}[^\n]*\.$"):
        check_jump(tmp_path, **SIZES)


def test_configuration() -> None:
    """One sentence. Fails if a jump without a head gets as far as an engine."""
    with pytest.raises(ConfigError, match=r"^jump: head is missing; it must be a non-empty string\.$"):
        parse_config({"method": "jump"})
    with pytest.raises(ConfigError, match=r"^jump: draft_sample_method must be one of "):
        parse_config({"method": "jump", "head": "x", "draft_sample_method": "warm"})
