"""Rounds in PyTorch, on any device."""

import torch

from ..rejection.noise import ACCEPT, RECOVERED_TOKEN, exponential, keys, uniform
from ..rejection.reference import draft_ratio, residual


def try_siblings(
    p: torch.Tensor,  # [N, V] probabilities, as q
    q: torch.Tensor,
    siblings: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    left, accepted, accept_keys = p, torch.full_like(positions, -1), keys(seeds, positions, ACCEPT)
    for turn, tokens in enumerate(siblings.long().unbind(1)):
        token = tokens.clamp(min=0)[:, None]
        known = (tokens >= 0) & (q.gather(1, token)[:, 0] > 0)
        ratio = draft_ratio(left.gather(1, token), q.gather(1, token))[:, 0]
        accepts = known & (uniform(accept_keys, torch.full_like(positions, turn)) < ratio)
        accepted = torch.where(accepts & (accepted < 0), tokens, accepted)
        left = torch.where(known[:, None], _normal(residual(left, q)), left)
        q = torch.where(known[:, None], _normal(q.scatter(1, token, 0.0)), q)
    return torch.where(accepted >= 0, accepted, _drawn(left, keys(seeds, positions, RECOVERED_TOKEN)))


def _normal(weights: torch.Tensor) -> torch.Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def _drawn(weights: torch.Tensor, token_keys: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(weights.shape[1], device=weights.device)
    return (weights / exponential(token_keys[:, None], tokens)).argmax(dim=1)
