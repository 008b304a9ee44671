"""Builds draft trees: a drafter's chain, with the likeliest alternatives at each of its positions. A lookup's chain may
be merged into it (Miao et al. 2024, "SpecInfer").

The alternatives come from the drafter's logits, so a tree needs no more passes than a chain, and the same attention.
The tree has the likeliest nodes of all candidates, best first, so each prefix is the best tree of its size. R:
requests, D: tokens of the chain, C: candidates per position, L: tokens of the other chain, at least D, M: all
candidates, N: nodes of a tree without its root.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from vllm_specplugins.config.trees import chain_length, sibling_places
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import race_logprobs
from vllm_specplugins.kernels.rounds.siblings import draw_siblings
from vllm_specplugins.proposers.draft_sampler import ModelProposer
from vllm_specplugins.target import Target

MAX_CANDIDATES = 8


class Tree(NamedTuple):
    """A tree for each request, in topological order: token ids [R, N] int32; parents [R, N] int64, where 0 is the root
    and 1 the first node; is_other [R, N] bool, whether the node comes from the other chain only; and for sampled drafts
    logits [R, D, V] of q at each depth."""

    token_ids: torch.Tensor
    parents: torch.Tensor
    is_other: torch.Tensor
    logits: torch.Tensor | None = None


def draft_tree(
    proposer: ModelProposer, target: Target, num_nodes: int, branches: torch.Tensor, other: Any = None
) -> Tree:
    """Returns a tree or a chain for each request (see `grow`). A request with edited logits must get a chain."""
    if not proposer.is_one_hot:
        return _sampled_tree(proposer, target, num_nodes, branches)
    length, logits = chain_length(num_nodes), list[torch.Tensor]()
    steps = proposer.draft_steps(target, length, on_logits=lambda step, row_logits: logits.append(row_logits))
    positions = target.num_tokens[:, None] + torch.arange(length, device=target.num_tokens.device)
    sampling = target.sampling.verified if proposer.is_coupled else None
    if sampling is None:  # the noise is unknown, so all requests count as greedy
        zeros = torch.zeros_like(target.num_tokens)
        sampling = Sampling(zeros.float(), zeros)
    return grow(steps.token_ids, torch.stack(logits, dim=1), positions, sampling, num_nodes, branches, other)


def _sampled_tree(proposer: ModelProposer, target: Target, num_nodes: int, branches: torch.Tensor) -> Tree:
    """Returns a tree of the same shape for each request (kernels/rounds): the chain, and siblings of its tokens."""
    steps, places = proposer.draft_steps(target, chain_length(num_nodes)), sibling_places(num_nodes)
    assert steps.logits is not None
    length, device = steps.token_ids.shape[1], steps.token_ids.device
    at_steps, nodes = (torch.arange(size, device=device) for size in (length, num_nodes))
    sampling = Sampling(target.sampling.temperature[:, None], target.sampling.seeds[:, None])
    positions, num_siblings = target.num_tokens[:, None] + at_steps, sum(depth == 0 for depth, _ in places)
    siblings = draw_siblings(steps.logits, steps.token_ids, positions, sampling, num_siblings)
    # It consists of tensors on the device, since a graph may record it.
    token_ids = torch.stack([siblings[:, depth, turn] for depth, turn in places], dim=1)
    above = torch.stack([nodes[places.index((depth - 1, 0)) + 1 if depth else 0] for depth, _ in places])
    parents = torch.where(branches[:, None], above, nodes)
    token_ids = torch.where(branches[:, None], token_ids.int(), steps.token_ids[:, nodes.clamp(max=length - 1)])
    return Tree(token_ids, parents, torch.zeros_like(parents, dtype=torch.bool), steps.logits)


def grow(
    chain: torch.Tensor,  # [R, D] int
    logits: torch.Tensor,  # [R, D, vocab_size], of its tokens
    positions: torch.Tensor,  # [R, D] int64, of its tokens
    sampling: Sampling,  # of the requests, [R] each
    num_nodes: int,
    branches: torch.Tensor,  # [R] bool, whether a request may have a tree; otherwise it gets a chain
    # Another chain [R, L] int, and for each token the log-probability that it and all earlier ones are accepted, -inf
    # after the end.
    other: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Tree:
    """Selects the likeliest nodes. A request without a tree gets the likelier chain, padded with its last token."""
    tokens, survival = _candidates(chain, logits, positions, sampling)
    (depth, width), nodes = tokens.shape[1:], torch.arange(num_nodes, device=chain.device)
    line = nodes.clamp(max=depth - 1) * width  # places of the chain
    parents = (torch.arange(depth * width, device=chain.device) // width - 1).mul(width).expand(len(chain), -1)
    tokens, total = tokens.flatten(1), survival[..., 0].exp().sum(dim=1)
    if other is None:
        survival = survival.flatten(1)
    else:
        is_likelier = other[1].exp().sum(dim=1) > total
        line = torch.where(is_likelier[:, None], depth * width + nodes.clamp(max=other[0].shape[1] - 1), line)
        survival, more = _merged(tokens.view_as(survival), survival, *other)
        tokens, parents = torch.cat((tokens, other[0]), dim=1), torch.cat((parents, more), dim=1)
    # The sort is stable: among equal values a parent comes before its children.
    best = survival.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    parent = parents.gather(1, best)
    above = (best[:, None] == parent[..., None]).int().argmax(dim=2) + 1
    above = torch.where(branches[:, None], above.masked_fill(parent < 0, 0), nodes)
    places = torch.where(branches[:, None], best, line)
    return Tree(tokens.gather(1, places).int(), above, places >= depth * width)


def _candidates(
    chain: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [R, D, C], in which the chain's token is the first, and the log-probability that they and all
    earlier ones are accepted. Only the chain's tokens have children."""
    num_rows, depth, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=chain.device).repeat_interleave(depth)
    probs = race_logprobs(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view_as(logits)
    tokens = chain.long()[..., None]
    others = probs.scatter(2, tokens, -torch.inf).topk(min(MAX_CANDIDATES, vocab_size) - 1, dim=2)
    total = probs.gather(2, tokens).nan_to_num(-torch.inf).cumsum(dim=1).cummin(dim=1).values
    before = pad(total[:, :-1], (0, 0, 1, 0))
    survival = torch.cat((total, (before + others.values).nan_to_num(-torch.inf)), dim=2)
    return torch.cat((tokens, others.indices), dim=2), survival


def _merged(
    tokens: torch.Tensor, survival: torch.Tensor, other_ids: torch.Tensor, other_survival: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the survival [R, M] of the candidates and then of another chain's tokens, and the parents [R, L] of the
    latter. If both have a token after the same tokens, it is one node with the larger of both probabilities."""
    (depth, width), length = tokens.shape[1:], other_ids.shape[1]
    steps = torch.arange(length, device=tokens.device)
    is_equal = tokens == other_ids[:, :depth, None]
    num_same = is_equal[..., 0].int().cumprod(dim=1).sum(dim=1, keepdim=True)
    is_twin = is_equal & (steps[:depth] <= num_same)[..., None]
    survival = survival.maximum(other_survival[:, :depth, None].masked_fill(~is_twin, -torch.inf))
    twins = steps[:depth] * width + is_twin.int().argmax(dim=2)
    has_twin, twins = (pad(part, (0, length - depth)) for part in (is_twin.any(dim=2), twins))
    nodes = torch.where(has_twin, twins, depth * width + steps)
    alone = other_survival.masked_fill(has_twin, -torch.inf)
    return torch.cat((survival.flatten(1), alone), dim=1), pad(nodes[:, :-1], (1, 0), value=-1)
