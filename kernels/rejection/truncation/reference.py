"""Thresholds of top-k, top-p and min-p, in PyTorch.

All three keep the tokens whose logit is at least some threshold, so together they are one number a row. In vLLM's
order: min-p and top-k see the whole distribution, top-p what they left, renormalised. Ties with the last token kept
are kept, so the result does not depend on the order of the vocabulary. N: rows, V: vocab_size.
"""

import torch

_PREFIX = 128
_NUM_BINS, _BINS_PER_BIT = 4096, 64


def thresholds(
    logits: torch.Tensor,  # [N, V] floating, no NaN
    scale: torch.Tensor,  # [N] same dtype: the weight of a token is exp2((logit - row maximum) * scale)
    weights: torch.Tensor,  # [N, V] same dtype: of the tokens
    top_k: torch.Tensor | None,  # [N] integer; below 1, or V and more, keeps all
    top_p: torch.Tensor | None,  # [N] floating in (0, 1]; 1 keeps all
    min_p: torch.Tensor | None,  # [N] floating in [0, 1]; 0 keeps all
) -> torch.Tensor:
    """Smallest logit kept [N], -inf where all are.

    A row's largest logits decide where they are more than it keeps; else a histogram finds where top-p ends.

    >>> logits = torch.tensor([[3.0, 1.0, 2.0, 1.0]])
    >>> thresholds(logits, torch.ones(1), torch.exp2(logits - 3), torch.tensor([2]), None, None)
    tensor([2.])
    """
    if top_k is None and top_p is None:
        return _min_p_limit(logits.amax(-1), scale, min_p)
    vocab_size = logits.shape[-1]
    top_k = torch.full_like(scale, vocab_size) if top_k is None else top_k
    top_k = torch.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k).long()
    top_p = torch.ones_like(scale) if top_p is None else top_p.to(scale.dtype)
    min_p = torch.zeros_like(scale) if min_p is None else min_p.to(scale.dtype)
    largest_k = int(torch.where(top_k < vocab_size, top_k, 0).max())
    size = max(_PREFIX, largest_k + 1)
    prefix = logits.topk(size if 4 * size < vocab_size else vocab_size, dim=-1).values
    limit, decided, result = _from_prefix(prefix, vocab_size, scale, weights.sum(-1), top_k, top_p, min_p)
    if prefix.shape[-1] < vocab_size:
        for row in (~decided).nonzero()[:, 0].tolist():
            kept = logits[row][logits[row] >= limit[row]]
            result[row] = _nucleus_limit(kept, prefix[row, 0], scale[row], top_p[row])
    return result


def _min_p_limit(maximum: torch.Tensor, scale: torch.Tensor, min_p: torch.Tensor | None) -> torch.Tensor:
    """Smallest logit that min-p keeps, [N], -inf where it is 0."""
    if min_p is None:
        return torch.full_like(maximum, -torch.inf)
    return maximum + torch.log2(min_p.to(scale.dtype)) / scale


def _from_prefix(
    prefix: torch.Tensor,  # [N, size]: a row's largest logits, descending
    vocab_size: int,
    scale: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Threshold of top-k and min-p [N]; whether the largest logits decide top-p [N]; the threshold if they do [N]."""
    size = prefix.shape[-1]
    maximum = prefix[:, 0]
    kth = prefix.gather(1, (top_k.clamp(max=size) - 1)[:, None])[:, 0]
    limit = torch.where(top_k < vocab_size, kth, -torch.inf)
    limit = torch.maximum(limit, _min_p_limit(maximum, scale, min_p))
    inside = prefix >= limit[:, None]
    weights = torch.exp2((prefix - maximum[:, None]) * scale[:, None]).masked_fill_(~inside, 0).double()
    remaining = torch.where(limit > -torch.inf, weights.sum(-1), total.double())
    above = weights.cumsum(-1) - weights
    # The most probable token always stays: nothing is above it.
    kept = inside & (above < (top_p * remaining)[:, None]) | (prefix == maximum[:, None])
    nucleus = torch.where(kept, prefix, torch.inf).amin(-1)
    result = torch.where(top_p < 1, nucleus, limit)
    # Beyond the prefix there may be more of what top-p sums up or keeps, unless its last logit is out already.
    last = prefix[:, -1]
    decided = (top_p == 1) | (maximum == -torch.inf) | ((limit == -torch.inf) | (last < limit)) & (last < result)
    return limit, decided, result


def _nucleus_limit(
    logits: torch.Tensor,  # [M]: those of a row that top-k and min-p keep
    maximum: torch.Tensor,
    scale: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Smallest logit with less than top_p of the weight above it, from a histogram of which one bin is sorted."""
    depths = (maximum - logits) * scale
    weights = torch.exp2(-depths).double()
    bins = (depths * _BINS_PER_BIT).clamp_(max=_NUM_BINS - 1).int()
    above = torch.bincount(bins, weights, minlength=_NUM_BINS).cumsum(0)
    target = top_p * above[-1]
    last = int((above < target).sum().clamp(max=_NUM_BINS - 1))
    inside = bins == last
    candidates, order = logits[inside].sort(descending=True)
    sizes = weights[inside][order]
    before = above[last] - sizes.sum() + sizes.cumsum(0) - sizes
    return candidates[int((before < target).sum().clamp(min=1)) - 1]
