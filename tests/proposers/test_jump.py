"""Jumps: what one is fed, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.kernels.rejection.drafts import coupled_sample

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.target import Sampling, Target

HIDDEN, VOCAB, NUM_LAYERS, NUM_REQS = 8, 11, 6, 4
SIZES = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN}


def random_head(early_layers: int = 0) -> JumpHead:
    config = JumpHeadConfig(early_layers=early_layers, late_layer=4, inner_size=3, rms_norm_eps=1e-5, **SIZES)
    generator = torch.Generator().manual_seed(0)
    shapes = JumpHead(config).state_dict()
    return JumpHead(config, {name: torch.randn(like.shape, generator=generator) for name, like in shapes.items()})


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


def test_configuration() -> None:
    """One sentence. Fails if a jump without a head gets as far as an engine."""
    with pytest.raises(ConfigError, match=r"^jump: head is missing; it must be a path\.$"):
        parse_config({"method": "jump"})
    with pytest.raises(ConfigError, match=r"^jump: draft_sample_method must be one of "):
        parse_config({"method": "jump", "head": "x", "draft_sample_method": "warm"})
