"""Siblings in rounds: tests the exact distribution by enumeration in fp64, draws by chi-squared, and the kernel against
the reference."""

import doctest
import itertools
from typing import Any

import pytest
import torch
from interpreted import DEVICE, RUNS, needs_triton
from scipy.stats import chisquare
from test_rejection import simplex
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import sample_with_q
from vllm_specplugins.kernels.rejection.inputs import to_device
from vllm_specplugins.kernels.rounds import reference
from vllm_specplugins.kernels.rounds import siblings as of_nodes
from vllm_specplugins.kernels.rounds.siblings import MAX_SIBLINGS, draw_siblings, try_siblings

from vllm_specplugins.config.proposers import MAX_TREE
from vllm_specplugins.config.trees import sibling_places

once = pytest.mark.skipif(RUNS, reason="once is enough")
NUM_DRAWS = 200_000


@once
def test_docstrings() -> None:
    """And trees that have no more siblings than are tried. Kills: siblings that are drafted in vain."""
    assert doctest.testmod(of_nodes).failed == 0
    for num_nodes in range(1, MAX_TREE + 1):
        assert sum(depth == 0 for depth, _ in sibling_places(num_nodes)) < MAX_SIBLINGS


def law_of(p: torch.Tensor, q: torch.Tensor, num_siblings: int, monkeypatch: Any) -> torch.Tensor:
    """[N, V] the law of a node's token for each pair of p and q [N, V], of all orders in which siblings may be drawn:
    the code rejects all of them, and says at each turn how likely it would have accepted, and what it draws from."""
    vocab_size, ratios, left = p.shape[1], list[torch.Tensor](), list[torch.Tensor]()
    ratio = reference.draft_ratio

    def noted(*args: torch.Tensor) -> torch.Tensor:
        ratios.append(ratio(*args))
        return ratios[-1]

    def drawn(weights: torch.Tensor, *_: Any) -> torch.Tensor:
        left.append(weights)
        return weights.argmax(dim=1)

    monkeypatch.setattr(reference, "draft_ratio", noted)
    monkeypatch.setattr(reference, "_drawn", drawn)
    monkeypatch.setattr(reference, "uniform", lambda keys, _: torch.full(keys.shape, torch.inf))
    rows, law = torch.arange(len(p)), torch.zeros_like(p)
    for order in itertools.permutations(range(vocab_size), num_siblings):
        ratios.clear()
        chance, rest = torch.ones_like(p[:, 0]), torch.ones_like(p[:, 0])
        for token in order:  # where q has no token left, the siblings end
            chance = chance * torch.where(rest > 1e-12, q[:, token] / rest, 1.0 if token == max(order) else 0.0)
            rest = rest - q[:, token]
        siblings = torch.tensor(order).expand(len(p), -1)
        reference.try_siblings(p, q, siblings, rows, rows)
        for turn, token in enumerate(order):
            exists = q[:, token] > 0
            accepts = torch.where(exists, ratios[turn][:, 0].clamp(max=1), 0.0)
            law[rows, token] += chance * accepts
            chance = chance * (1 - accepts)
        law += chance[:, None] * left[-1] / left[-1].sum(dim=1, keepdim=True)
    return law


def pairs(vocab_size: int, parts: int, positive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    grid = simplex(vocab_size, parts)
    some = grid[(grid > 0).all(dim=1)] if positive else grid
    p, q = grid.repeat_interleave(len(some), dim=0), some.repeat(len(grid), 1)
    return p, q


@once
@pytest.mark.parametrize(
    ("vocab_size", "parts", "num_siblings"), [(3, 5, 1), (3, 5, 2), (3, 5, 3), (4, 5, 2), (4, 5, 3)]
)
def test_law(vocab_size: int, parts: int, num_siblings: int, monkeypatch: Any) -> None:
    """Every pair of p and q, zeros of p included, integrated exactly over all orders of siblings. Kills: a residual
    that is not normalised, a q with the siblings before, a sibling that is tried against p."""
    p, q = pairs(vocab_size, parts, positive=True)
    assert (law_of(p, q, num_siblings, monkeypatch) - p).abs().max() < 1e-12


@once
@pytest.mark.parametrize("fault", ["residual", "siblings", "q", "acceptance"])
def test_faults_are_seen(fault: str, monkeypatch: Any) -> None:
    """The enumeration detects typical errors in SpecInfer's rule."""
    normal = reference._normal
    if fault == "residual":  # of the second turn: p itself
        monkeypatch.setattr(reference, "residual", lambda left, q: left)
    elif fault == "q":  # not normalised after a sibling is gone
        monkeypatch.setattr(reference, "_normal", lambda weights: weights)
    elif fault == "siblings":  # q as if drawn with replacement
        turns = itertools.count()
        monkeypatch.setattr(reference, "_normal", lambda w: normal(w) if next(turns) % 2 == 0 else normal(w + 0.1))
    else:
        ratio = reference.draft_ratio
        monkeypatch.setattr(reference, "draft_ratio", lambda p, q: ratio(p, q) * 1.05)
    p, q = pairs(3, 5, positive=True)
    assert (law_of(p, q, 3, monkeypatch) - p).abs().max() > 1e-3


@once
def test_tokens_of_no_chance() -> None:
    """A q with fewer tokens than siblings. Kills: a sibling that q cannot draw, accepted because p can."""
    rows = 20_000
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    sampling = Sampling(torch.ones(rows), torch.arange(rows))
    siblings = torch.tensor([0, 1, 2]).expand(rows, -1)
    tokens = try_siblings(*(own.log().expand(rows, -1) for own in (p, q)), siblings, torch.zeros(rows).long(), sampling)
    assert chisquare(tokens.bincount(minlength=3), p * rows).pvalue > 1e-4


@once
@pytest.mark.parametrize(
    ("temperature", "top_k", "shared_noise"),
    [(1.0, 0, False), (0.8, 0, False), (1.0, 6, False), (1.3, 3, False), (1.0, 0, True)],
)
def test_distribution(temperature: float, top_k: int, shared_noise: bool) -> None:
    """Siblings as the product draws them, and with noise of verification, which the test can tell. Kills: siblings that
    repeat the first one's noise."""
    rng = torch.Generator().manual_seed(1)
    target, draft = 2 * torch.randn(2, 1, 16, generator=rng)
    seeds, positions = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 9)
    heat, limit = torch.full((NUM_DRAWS,), temperature), torch.full((NUM_DRAWS,), top_k, dtype=torch.int32)
    sampling = Sampling(heat, seeds, limit if top_k else None)
    drafting = sampling if shared_noise else Sampling(heat, seeds + (1 << 40), sampling.top_k)
    first, q_logits = sample_with_q(draft.expand(NUM_DRAWS, -1), positions, drafting)
    siblings = draw_siblings(q_logits, first, positions, drafting, 4)
    assert (siblings.sort(dim=1).values.diff(dim=1) > 0).all()
    tokens = try_siblings(target.expand(NUM_DRAWS, -1), q_logits, siblings, positions, sampling)
    logits = target[0] / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = logits.double().softmax(0) * NUM_DRAWS
    seen, counts = expected > 0, tokens.bincount(minlength=16)
    assert counts[~seen].sum() == 0
    is_right = chisquare(counts[seen], expected[seen] * (NUM_DRAWS / expected[seen].sum())).pvalue > 1e-4
    assert is_right != shared_noise


@needs_triton
@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab_size", "num_siblings"), [(3, 3, 3), (700, 650, 4), (9000, 9000, 2), (300, 300, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(vocab_size: int, draft_vocab_size: int, num_siblings: int, dtype: torch.dtype) -> None:
    """Token for token. Kills: a tile or a group of another row, noise of another stream, a sibling of another turn."""
    rng, num_nodes = torch.Generator().manual_seed(2), 48
    target, noise = torch.randn(2, num_nodes, vocab_size, generator=rng)
    target = (3 * target).to(dtype)
    draft = (target + noise.to(dtype))[:, :draft_vocab_size].contiguous()
    draft[3, 1], draft[4, 2] = torch.nan, torch.inf
    positions, seeds = torch.randint(1000, (2, num_nodes), generator=rng)
    top_k = torch.where(torch.arange(num_nodes) % 3 == 0, 2, 0).int()
    sampling = Sampling(torch.tensor([0.7, 1.0, 1.4]).repeat(num_nodes // 3), seeds, top_k)
    first, q_logits = sample_with_q(draft, positions, Sampling(sampling.temperature, seeds + 5, top_k))
    siblings = draw_siblings(q_logits, first, positions, sampling, num_siblings)
    siblings[5:9, -1] = -1
    arguments = target, q_logits, siblings, positions, sampling
    expected = try_siblings(*arguments, implementation="reference")
    actual = try_siblings(*to_device(arguments, DEVICE), implementation="fused").cpu()
    assert (actual == expected).sum() >= 47, "a near tie"
    accepted = (expected[:, None] == siblings).any(dim=1)
    assert num_siblings > 1 or (accepted.any() and not accepted.all())
