"""The race of a row's tokens in Triton, group by group.

What a group weighs under p bounds what it weighs in max(p - q, 0) or after a truncation, and its noise is known: so
groups are opened in the order in which they could arrive, until none that is left could still win. A residual of mass
s wants about 1 / s groups opened; as a draft is rejected with probability s, it is about one a step.
"""

import triton
import triton.language as tl

from ..noise.fused import exponential, stream_key
from ..noise.reference import GROUP, RECOVERED_GROUP, RECOVERED_TOKEN, TOKEN
from ..scan.fused import load_logits

_GROUP, _TOKEN = tl.constexpr(GROUP), tl.constexpr(TOKEN)
_RECOVERED_GROUP, _RECOVERED_TOKEN = tl.constexpr(RECOVERED_GROUP), tl.constexpr(RECOVERED_TOKEN)
# Sums in another order may differ by some roundings.
_ROUNDING = tl.constexpr(1.0001)
# What is left where rounding leaves nothing of max(p - q, 0), as a share of p: 2**-80.
_REST = tl.constexpr(8.271806125530277e-25)


@triton.jit
def first_of_largest(row_ptr, maxima, vocab_size, GROUP_SIZE: tl.constexpr):
    """First of the most probable tokens of a row, from its groups' maxima; 0 for a row of -inf alone."""
    largest, group = tl.max(maxima, axis=0, return_indices=True)
    tokens = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    logits = load_logits(row_ptr, tokens, tokens < vocab_size)
    return group * GROUP_SIZE + tl.argmax((logits == largest).to(tl.int32), axis=0)


@triton.jit
def _weights(p, q, scale, ratio, tokens):
    """max(ratio * p - q, 0) of some tokens; p without a draft."""
    row_ptr, vocab_size, limit, maximum, total = p
    logits = load_logits(row_ptr, tokens, tokens < vocab_size)
    weights = tl.where(logits >= limit, tl.exp2((logits - maximum) * scale) / total, 0.0)
    if q is not None:
        draft_row_ptr, draft_vocab_size, draft_maximum, draft_total = q
        draft_logits = load_logits(draft_row_ptr, tokens, tokens < draft_vocab_size)
        q_weights = tl.exp2((draft_logits - draft_maximum) * scale) / draft_total
        weights = tl.maximum(ratio * weights - q_weights, 0.0) + weights * _REST
    return weights


@triton.jit
def race(
    # the row, vocab_size, smallest logit that is kept, largest logit, sum of the weights that are kept
    p,
    # of the draft that was rejected in this row: its row, vocab_size, largest logit, sum of its weights. None, or a
    # vocab_size of 0: there was none
    q,
    scale,
    # of block verification; else 1
    ratio,
    seed,
    position,
    # [GROUPS] from load_scan
    maxima,
    totals,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """The token that arrives first, in weights max(ratio * p - q, 0), or p where there was no draft."""
    recovers = False
    if q is not None:
        recovers = q[1] > 0
    key = stream_key(seed, position, tl.where(recovers, _RECOVERED_GROUP, _GROUP).to(tl.int64))
    groups, within = tl.arange(0, GROUPS), tl.arange(0, GROUP_SIZE)
    share = tl.where(recovers, ratio + _REST, 1.0)
    rates = tl.where(maxima >= p[2], share * totals / p[4], 0.0) / exponential(key, groups)
    best, winner = -1.0, 0
    bound, group = tl.max(rates, axis=0, return_indices=True)
    while bound * _ROUNDING > best:
        weights = _weights(p, q, scale, ratio, group * GROUP_SIZE + within)
        rate = tl.sum(weights, axis=0) / exponential(key, group)
        winner = tl.where(rate > best, group, winner)
        best = tl.maximum(rate, best)
        rates = tl.where(groups == group, -2.0, rates)
        bound, group = tl.max(rates, axis=0, return_indices=True)
    tokens = winner * GROUP_SIZE + within
    key = stream_key(seed, position, tl.where(recovers, _RECOVERED_TOKEN, _TOKEN).to(tl.int64))
    return winner * GROUP_SIZE + tl.argmax(_weights(p, q, scale, ratio, tokens) / exponential(key, tokens), axis=0)
