"""Thresholds of top-k, top-p and min-p in PyTorch. Each cuts the tokens below a threshold of the logit, so together
they give one threshold per row. As in vLLM, min-p and top-k apply to the whole distribution, and top-p to the rest,
renormalised. Tokens at the threshold stay, so the result does not depend on the order of the vocabulary. N: rows, V:
vocab_size."""

import torch

_PREFIX = 128


def thresholds(
    logits: torch.Tensor,  # [N, V] floating, no NaN
    scale: torch.Tensor,  # [N] same dtype
    weights: torch.Tensor,  # [N, V] same dtype: exp2((logit - row maximum) * scale)
    top_k: torch.Tensor | None,  # [N] integer; no limit below 1 and from V on
    top_p: torch.Tensor | None,  # [N] floating in (0, 1]; 1 is no limit
    min_p: torch.Tensor | None,  # [N] floating in [0, 1]; 0 is no limit
) -> torch.Tensor:
    """Returns thresholds [N], -inf without a limit. A row's largest logits usually decide; otherwise more logits are
    read.

    >>> logits = torch.tensor([[3.0, 1.0, 2.0, 1.0]])
    >>> thresholds(logits, torch.ones(1), torch.exp2(logits - 3), torch.tensor([2]), None, None)
    tensor([2.])
    """
    result = torch.full_like(scale, -torch.inf)
    if min_p is not None:
        result = logits.amax(-1) + torch.log2(min_p.to(scale.dtype)) / scale
    if top_k is None and top_p is None:
        return result
    vocab_size = logits.shape[-1]
    top_k = torch.full_like(scale, vocab_size) if top_k is None else top_k
    top_k = torch.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k).long()
    top_p = torch.ones_like(scale) if top_p is None else top_p.to(scale.dtype)
    parameters = scale, weights.sum(-1), top_k, top_p, result
    rows, largest_k = torch.arange(len(logits), device=logits.device), int((top_k % vocab_size).max())
    size = max(_PREFIX, largest_k + 1)
    while len(rows):
        size = size if 4 * size < vocab_size else vocab_size
        prefix = logits[rows].topk(size).values
        result[rows], decided = _from_prefix(prefix, vocab_size, *(values[rows] for values in parameters))
        rows, size = rows[~decided], 16 * size
    return result


def _from_prefix(
    prefix: torch.Tensor,  # [N, size]: a row's largest logits, descending
    vocab_size: int,
    scale: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    limit: torch.Tensor,  # of min-p
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the thresholds [N], and whether the largest logits decide them [N]; otherwise the thresholds of min-p."""
    size = prefix.shape[-1]
    maximum = prefix[:, 0]
    kth = prefix.gather(1, (top_k.clamp(max=size) - 1)[:, None])[:, 0]
    both = torch.maximum(torch.where(top_k < vocab_size, kth, -torch.inf), limit)
    inside = prefix >= both[:, None]
    weights = torch.exp2((prefix - maximum[:, None]) * scale[:, None]).masked_fill_(~inside, 0).double()
    whole = (both > -torch.inf) | (size == vocab_size)
    above = weights.cumsum(-1) - weights
    # The argmax stays: nothing is above it.
    stays = inside & (above < (top_p * torch.where(whole, weights.sum(-1), total))[:, None])
    nucleus = torch.where(stays | (prefix == maximum[:, None]), prefix, torch.inf).amin(-1)
    result = torch.where(top_p < 1, nucleus, both)
    # Top-p may sum up or leave tokens beyond the prefix, unless the last logit of the prefix is cut.
    last = prefix[:, -1]
    decided = (top_p == 1) | (maximum == -torch.inf) | ((both == -torch.inf) | (last < both)) & (last < result)
    decided |= size == vocab_size
    return torch.where(decided, result, limit), decided
