"""Trees of drafts, grown along one draft: the tokens that may stand in the place of each of its own.

A drafter runs as it does for a chain, and its logits say what else might follow; so its passes are no more, and its
attention is no other. Of all candidates the likeliest nodes are kept, best first: a prefix of them is the best tree of
its size. R: requests, D: tokens of the chain, C: candidates of a place, N: nodes of a tree, beside its root.
"""

from typing import NamedTuple

import torch

from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import race_logprobs

MAX_CANDIDATES = 8


class Tree(NamedTuple):
    """A tree of each request, in topological order.

    Args:
        token_ids: [R, N] int32.
        parents: [R, N] int64: 0 is the root, and the first node 1.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor


def grow(
    chain: torch.Tensor,  # [R, D] int
    logits: torch.Tensor,  # [R, D, vocab_size], that its tokens come from
    positions: torch.Tensor,  # [R, D] int64, where they stand
    sampling: Sampling,  # of the requests, [R] each
    num_nodes: int,
    branches: torch.Tensor,  # [R] bool: whether a request may have a tree, or a chain
) -> Tree:
    """The likeliest nodes; a request that may have none gets its chain, and after its end any tokens."""
    num_rows, depth, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=chain.device).repeat_interleave(depth)
    probs = race_logprobs(logits.flatten(0, 1), positions.flatten(), sampling.at(rows)).view_as(logits)
    own = chain.long()[..., None]
    others = probs.scatter(2, own, -torch.inf).topk(min(MAX_CANDIDATES, vocab_size) - 1, dim=2)
    total = probs.gather(2, own).nan_to_num(-torch.inf).cumsum(dim=1).cummin(dim=1).values
    before = torch.nn.functional.pad(total[:, :-1], (0, 0, 1, 0))
    survival = torch.cat((total, (before + others.values).nan_to_num(-torch.inf)), dim=2)
    tokens = torch.cat((own, others.indices), dim=2)
    places, parents = _chosen(survival, num_nodes, branches)
    return Tree(tokens.flatten(1).gather(1, places).int(), parents)


def _chosen(
    survival: torch.Tensor,  # [R, D, C], the chain's tokens first, after which alone others stand
    num_nodes: int,
    branches: torch.Tensor,  # [R] bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidates the nodes are, and their parents, [R, N] int64 each. Of equals the one comes first that stands
    first, so that a parent does. After a chain's end its last token is repeated."""
    _, depth, width = survival.shape
    nodes = torch.arange(num_nodes, device=survival.device)
    best = survival.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    parent = (best // width - 1) * width  # of the chain's token before
    above = (best[:, None] == parent[..., None]).int().argmax(dim=2) + 1
    above = above.masked_fill(parent < 0, 0)
    chain = (nodes.clamp(max=depth - 1) * width).expand_as(best)
    return torch.where(branches[:, None], best, chain), torch.where(branches[:, None], above, nodes)
