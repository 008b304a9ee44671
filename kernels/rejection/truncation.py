"""Thresholds of top-k, top-p and min-p, in PyTorch.

All three keep the tokens whose logit is at least some threshold, so together they are one number a row. In vLLM's
order: min-p and top-k see the whole distribution, top-p what they left, renormalised. Ties with the last token kept
are kept, so the result does not depend on the order of the vocabulary. N: rows, V: vocab_size.
"""

import torch

_PREFIX = 128


def thresholds(
    logits: torch.Tensor,  # [N, V] floating, no NaN
    scale: torch.Tensor,  # [N] same dtype: the weight of a token is exp2((logit - row maximum) * scale)
    weights: torch.Tensor,  # [N, V] same dtype: of the tokens
    top_k: torch.Tensor | None,  # [N] integer; below 1, or V and more, keeps all
    top_p: torch.Tensor | None,  # [N] floating in (0, 1]; 1 keeps all
    min_p: torch.Tensor | None,  # [N] floating in [0, 1]; 0 keeps all
) -> torch.Tensor:
    """Smallest logit kept [N], -inf where all are.

    A row's largest logits decide where they are more than it keeps; else more of them are looked at.

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
    """The threshold if the largest logits decide [N], and whether they do [N]; else that of min-p."""
    size = prefix.shape[-1]
    maximum = prefix[:, 0]
    kth = prefix.gather(1, (top_k.clamp(max=size) - 1)[:, None])[:, 0]
    both = torch.maximum(torch.where(top_k < vocab_size, kth, -torch.inf), limit)
    inside = prefix >= both[:, None]
    weights = torch.exp2((prefix - maximum[:, None]) * scale[:, None]).masked_fill_(~inside, 0).double()
    whole = (both > -torch.inf) | (size == vocab_size)
    above = weights.cumsum(-1) - weights
    # The most probable token always stays: nothing is above it.
    kept = inside & (above < (top_p * torch.where(whole, weights.sum(-1), total))[:, None])
    nucleus = torch.where(kept | (prefix == maximum[:, None]), prefix, torch.inf).amin(-1)
    result = torch.where(top_p < 1, nucleus, both)
    # Beyond the prefix there may be more of what top-p sums up or keeps, unless its last logit is out already.
    last = prefix[:, -1]
    decided = (top_p == 1) | (maximum == -torch.inf) | ((both == -torch.inf) | (last < both)) & (last < result)
    decided |= size == vocab_size
    return torch.where(decided, result, limit), decided
