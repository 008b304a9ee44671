"""Drafts siblings in PyTorch, and computes the target's tokens after the nodes of a tree."""

import torch
from torch.nn.functional import pad

from ..implementations import module_of
from ..rejection import Sampling
from ..rejection.drafts import cut
from ..rejection.noise import RECOVERED_TOKEN, exponential, keys

MAX_SIBLINGS = 8  # of a node; `sibling_places` has fewer


def draw_siblings(
    draft_logits: torch.Tensor,  # [..., V] of q, -inf where cut
    first: torch.Tensor,  # [...] integer, drawn from q with the noise of the streams GROUP and TOKEN
    positions: torch.Tensor,  # [...] int64
    sampling: Sampling,  # of shapes that broadcast to [...]; at temperature 0 the likeliest tokens are siblings
    num_siblings: int,  # C, at most V
) -> torch.Tensor:
    """Returns tokens [..., C] int64, drawn without replacement, of which `first` is the first. Verification must use
    other seeds.

    >>> sampling = Sampling(torch.zeros(1), torch.tensor([7]))
    >>> draw_siblings(torch.tensor([[0.0, 9.0, 8.0]]), torch.tensor([1]), torch.tensor([5]), sampling, 2)
    tensor([[1, 2]])
    """
    first, tokens = first.long()[..., None], torch.arange(draft_logits.shape[-1], device=first.device)
    noise = exponential(keys(sampling.seeds, positions, RECOVERED_TOKEN)[..., None], tokens)
    scores = draft_logits.float().nan_to_num(-torch.inf) - sampling.temperature[..., None] * noise.log()
    return torch.cat((first, scores.scatter(-1, first, -torch.inf).topk(num_siblings - 1).indices), dim=-1)


def try_siblings(
    target_logits: torch.Tensor,  # [N, V] after each node
    draft_logits: torch.Tensor,  # [N, <= V] of q, before temperature, -inf where cut
    siblings: torch.Tensor,  # [N, C] integer, in the order in which they were drawn; -1: no more
    positions: torch.Tensor,  # [N] int64 of the siblings
    sampling: Sampling,  # of the nodes, [N] each; temperature 0 counts as 1
    implementation: str | None = None,  # "reference" or "fused"; None: the fastest that can run
) -> torch.Tensor:
    """Returns the target's token after each node, [N] int64: the accepted sibling, or one that is none of them.
    Siblings are rejected if q is not a distribution.

    >>> logits, sampling = torch.tensor([[0.0, 9.0]]), Sampling(torch.ones(1), torch.tensor([7]))
    >>> try_siblings(logits, logits, torch.tensor([[1, 0]]), torch.tensor([5]), sampling)
    tensor([1])
    """
    target_logits = cut(target_logits, positions, sampling, implementation)[0].float()
    finite = target_logits.nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
    heat = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]
    p, q = ((logits / heat).softmax(dim=-1).nan_to_num(0.0) for logits in (finite, draft_logits.float()))
    q = pad(q, (0, p.shape[1] - q.shape[1])).contiguous()
    tries = module_of(__package__, p, implementation).try_siblings
    return tries(p, q, siblings, positions, sampling.seeds)


def in_rounds(
    drawn: torch.Tensor,  # [R, W] int64, the target's token after each node
    tokens: torch.Tensor,  # [R, W] int64, of the nodes; -1: no node
    tree: tuple[torch.Tensor, torch.Tensor],  # parents and depths [R, W] int64 of the nodes
    target_logits: torch.Tensor,  # [num_logits, V]
    rows: torch.Tensor,  # [R, W] int64, of each node's logits
    draft_logits: torch.Tensor,  # [R, D, V], of q at each depth
    positions: torch.Tensor,  # [R] int64 of the tokens after the root
    sampling: Sampling,  # of the requests, [R] each
) -> torch.Tensor:
    """Returns `drawn` with the outcomes of rounds after the first node of each depth below D, the only one that may
    have children, in the order in which they were drawn. Rows with temperature 0 stay unchanged."""
    (parents, depths), (num_reqs, depth, _) = tree, draft_logits.shape
    steps, nodes = (torch.arange(size, device=drawn.device) for size in (depth, drawn.shape[1]))
    first = (depths[:, None] == steps[:, None]).int().argmax(dim=2)  # [R, D]
    is_child = (parents[:, None] == first[..., None]) & ((tokens >= 0) & (nodes > 0))[:, None]
    order = torch.where(is_child, len(nodes) - nodes, 0).topk(min(MAX_SIBLINGS, len(nodes)), dim=2)
    siblings = tokens[:, None].expand(is_child.shape).gather(2, order.indices).masked_fill(order.values == 0, -1)
    logits, places = target_logits[rows.gather(1, first)].flatten(0, 1), (positions[:, None] + steps).flatten()
    of_nodes = sampling.at(torch.arange(num_reqs, device=drawn.device).repeat_interleave(depth))
    tried = try_siblings(logits, draft_logits.flatten(0, 1), siblings.flatten(0, 1), places, of_nodes)
    decides = (siblings[..., 0] >= 0) & (sampling.temperature > 0)[:, None]
    return drawn.scatter(1, first, torch.where(decides, tried.view_as(first), drawn.gather(1, first)))
