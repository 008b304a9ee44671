"""Medusa heads: published formats, what they compute, what is refused."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.kernels.rejection.drafts import coupled_sample

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads, check_medusa
from vllm_specplugins.target import Sampling, Target

NUM_HEADS, NUM_LAYERS, HIDDEN, VOCAB = 3, 2, 8, 11
Tensors = dict[str, torch.Tensor]


def make_tensors(num_tokens: int = VOCAB) -> Tensors:
    """In FasterDecoding's names."""
    rng = torch.Generator().manual_seed(1)
    tensors = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=rng)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=rng)
        tensors[f"{head}.{NUM_LAYERS}.weight"] = torch.randn(num_tokens, HIDDEN, generator=rng)
    return tensors


def renamed(tensors: Tensors) -> Tensors:
    """In vLLM's names."""
    return {
        re.sub(r"(\d+)\.(\d+)\.weight", r"lm_heads.\1.weight", name)
        if "linear" not in name
        else re.sub(r"(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name): tensor
        for name, tensor in tensors.items()
    }


def expected_logits(states: torch.Tensor, tensors: Tensors, head: int) -> torch.Tensor:
    for layer in range(NUM_LAYERS):
        block = f"{head}.{layer}.linear"
        bias = tensors.get(f"{block}.bias", torch.zeros(HIDDEN))
        states = states + torch.nn.functional.silu(states @ tensors[f"{block}.weight"].T + bias)
    return states @ tensors[f"{head}.{NUM_LAYERS}.weight"].T


def never(hidden_states: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the heads have heads of their own")


@pytest.mark.parametrize(
    "file, names",
    [
        ("medusa_lm_head.pt", lambda tensors: tensors),
        ("medusa_lm_head.safetensors", lambda tensors: {f"medusa_heads.{k}": v for k, v in tensors.items()}),
        ("model.safetensors", renamed),
        ("pytorch_model.bin", renamed),
        ("model.safetensors", lambda tensors: renamed({k: v for k, v in tensors.items() if "bias" not in k})),
    ],
)
@pytest.mark.parametrize("num_draft", [1, 3])
def test_published_formats(file: str, names: Any, num_draft: int, tmp_path: Path) -> None:
    """Kills: heads in another order; a transposed weight; an activation before the sum; a bias of another head."""
    tensors = make_tensors()
    stored = names(tensors)
    if file.endswith(".safetensors"):
        save_file(stored, tmp_path / file)
    else:
        torch.save(stored, tmp_path / file)
    check_medusa(tmp_path, num_heads=NUM_HEADS, hidden_size=HIDDEN, vocab_size=VOCAB)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    if not any("bias" in name for name in stored):
        tensors = {name: tensor for name, tensor in tensors.items() if "bias" not in name}
    found = MedusaHeads.load(tmp_path, NUM_HEADS, VOCAB).logits(states, num_draft, never)
    for head in range(num_draft):
        torch.testing.assert_close(found[head], expected_logits(states, tensors, head))


@pytest.mark.parametrize("kind", ["own", "shared", "part", "none"])
def test_saved(kind: str, tmp_path: Path) -> None:
    """As they were read, whichever heads. Kills: a tensor that is not written, or under another's name."""
    tensors = renamed(make_tensors(5 if kind == "part" else VOCAB))
    if kind in ("shared", "none"):
        tensors = {name: tensor for name, tensor in tensors.items() if "lm_heads" not in name}
    tensors |= {"shared": {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}}.get(kind, {})
    tensors |= {"part": {"token_map": torch.tensor([9, 0, 3, 4, 7])}}.get(kind, {})
    save_file(tensors, tmp_path / "model.safetensors")
    found = MedusaHeads.load(tmp_path, NUM_HEADS, VOCAB)
    found.save(tmp_path, torch.float32)
    again, states = found.like_this(tmp_path), torch.randn(2, HIDDEN)
    own = [heads.logits(states, NUM_HEADS, lambda rows: rows @ torch.ones(HIDDEN, VOCAB)) for heads in (found, again)]
    assert torch.equal(*own)


def test_part_of_a_vocabulary(tmp_path: Path) -> None:
    """Kills: a token map that is taken for a range; tokens that the heads do not know at 0."""
    tensors, token_map = make_tensors(5), torch.tensor([9, 0, 3, 4, 7])
    save_file(renamed(tensors) | {"token_map": token_map}, tmp_path / "model.safetensors")
    states = torch.randn(2, HIDDEN)
    found = MedusaHeads.load(tmp_path, NUM_HEADS, VOCAB).logits(states, 1, never)[0]
    torch.testing.assert_close(found[:, token_map], expected_logits(states, tensors, 0))
    assert found.isneginf().sum(dim=1).tolist() == [VOCAB - 5] * 2


def test_shared_and_borrowed_heads(tmp_path: Path) -> None:
    """Tests one head for all, and the target's head if there is none."""
    layers = {name: tensor for name, tensor in renamed(make_tensors()).items() if "lm_heads" not in name}
    shared, states = torch.randn(VOCAB, HIDDEN), torch.randn(4, HIDDEN)
    save_file(layers | {"lm_head.weight": shared}, tmp_path / "model.safetensors")
    expected = MedusaHeads.load(tmp_path, NUM_HEADS, VOCAB).logits(states, 3, never)
    save_file(layers, tmp_path / "model.safetensors")
    borrowed = MedusaHeads.load(tmp_path, NUM_HEADS, VOCAB).logits(states, 3, lambda rows: rows @ shared.T)
    torch.testing.assert_close(borrowed, expected)


def without(*names: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def changed(name: str, tensor: torch.Tensor) -> Any:
    return lambda tensors: tensors | {name: tensor}


@pytest.mark.parametrize(
    "damage, words",
    [
        (without("1.0.linear.weight"), "with the 1.0.weight of its heads"),
        (without("2.2.weight"), "with the 2.head of its heads"),
        (without(*(f"2.{layer}.linear.{kind}" for layer in range(2) for kind in ("weight", "bias"))), "one with 2"),
        (changed("1.0.linear.weight", torch.zeros(4, 4)), "fit together"),
        (changed("1.0.linear.weight", torch.zeros(8)), "fit together"),
        (changed("1.0.linear.bias", torch.zeros(4)), "fit together"),
        (changed("0.2.weight", torch.zeros(VOCAB, 4)), "fit together"),
        (changed("token_map", torch.full((VOCAB,), VOCAB)), "token_map"),
        (changed("token_map", torch.zeros(VOCAB + 1, dtype=torch.int64)), "as many as a token_map has"),
        (changed("token_map", torch.zeros(VOCAB + 1)), "integers in token_map, not torch.float32"),
        (changed("1.0.linear.weight", torch.zeros(8, 8, dtype=torch.int8)), "floating-point numbers in 1.0.weight"),
        (changed("1.0.linear.weight", torch.ones(8, 8, dtype=torch.bool)), "floating-point numbers in 1.0.weight"),
        (lambda tensors: {"9" * 5000 + ".0.linear.weight": torch.zeros(8, 8)}, "one with 0"),
        (lambda tensors: {"0." + "9" * 5000 + ".linear.weight": torch.zeros(8, 8)}, "one with 0"),
        (lambda tensors: {"nothing": torch.zeros(1)}, "one with 0"),
        (lambda tensors: [tensors], "something else"),
    ],
)
def test_refused(damage: Any, words: str, tmp_path: Path) -> None:
    """One sentence each."""
    torch.save(damage(make_tensors()), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=words) as error:
        check_medusa(tmp_path, num_heads=NUM_HEADS, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert str(error.value).startswith("medusa: heads must be ") and "\n" not in str(error.value)


def test_refused_files(tmp_path: Path) -> None:
    """No file, pickles that are damaged or would run code, another model's heads."""
    arguments: Any = {"num_heads": NUM_HEADS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    with pytest.raises(ConfigError, match="one without"):
        check_medusa(tmp_path, **arguments)
    (path := tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04rubbish")
    for content in (None, {"0.0.linear.weight": SimpleNamespace()}):
        if content:
            torch.save(content, path)
        with pytest.raises(ConfigError, match="cannot be read"):
            check_medusa(tmp_path, **arguments)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    for size in ({"hidden_size": HIDDEN + 1}, {"vocab_size": VOCAB - 1}, {"num_heads": NUM_HEADS + 1}):
        with pytest.raises(ConfigError):
            check_medusa(tmp_path, **arguments | size)


@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_drafts(method: str, tmp_path: Path) -> None:
    """Head k drafts token k, with the noise of its position. Fails if heads or positions are off by one."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {"method": "medusa", "heads": str(tmp_path), "num_speculative_tokens": 3, "draft_sample_method": method}
    proposer = build_proposer(parse_config(raw), ProposerContext(VOCAB, 64, 8, 3, lambda text: []))
    num_reqs, states = 4, torch.randn(4, HIDDEN)
    heat, seeds, lengths = torch.tensor([0.0, 0.7, 1.0, 1.5]), torch.arange(4) * 31, torch.tensor([3, 9, 20, 5])
    verified = Verified(heat, seeds)
    forward: Any = SimpleNamespace(logits=never)
    target = Target(forward, torch.zeros(4, dtype=torch.int32), lengths, states, Sampling(heat, seeds, verified))
    wanted = np.array([3, 0, 2, 3], np.int32)
    draft = proposer.propose(DraftBatch(list("abcd"), (), wanted, [{}] * num_reqs, target))
    assert draft.num_draft.tolist() == wanted.tolist() and draft.token_ids.shape == (4, 3)
    assert (draft.logits is None) == (method != "probabilistic")
    for head in range(3):
        logits = expected_logits(states, tensors, head)
        if method == "greedy":
            assert torch.equal(draft.token_ids[:, head].long(), logits.argmax(-1))
        elif method == "coupled":
            assert torch.equal(draft.token_ids[:, head].long(), coupled_sample(logits, lengths + head, verified))
        else:
            torch.testing.assert_close(draft.logits[:, head], logits)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_q_that_is_no_distribution(value: float, tmp_path: Path) -> None:
    """The states of the heads overflow. Fails if their tokens become drafts, or if a row is not counted."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {"method": "medusa", "heads": str(tmp_path), "num_speculative_tokens": 3}
    context = ProposerContext(VOCAB, 64, 8, 3, lambda text: [])
    proposer = build_proposer(parse_config({**raw, "draft_sample_method": "probabilistic"}), context)
    barrier = FaultBarrier(proposer, VOCAB, 3, None)
    heat, seeds = torch.ones(2), torch.arange(2)
    for states, faults in ((torch.randn(2, HIDDEN), 0), (torch.full((2, HIDDEN), value), 5)):
        forward: Any = SimpleNamespace(logits=never)
        target = Target(forward, torch.zeros(2, dtype=torch.int32), torch.tensor([3, 9]), states, Sampling(heat, seeds))
        batch = DraftBatch(["a", "b"], (), np.array([3, 2], np.int32), [{}] * 2, target)
        draft = barrier.propose(batch, Feedback([], np.zeros(0, np.int32), np.zeros(0, np.int32)))
        assert sum(barrier.counters.faults.values()) == faults and draft.num_draft.any() == (not faults)
