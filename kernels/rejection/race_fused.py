"""The race of a row's tokens in Triton, group by group, with the noise of noise.py, bit for bit. A group's weight under
p bounds its weight in max(p - q, 0) and after truncation, and its noise is known. The race therefore opens groups in
the order of their earliest possible arrival, until no other group can win. For a residual of mass s it opens about 1 /
s groups. Since a draft is rejected with probability s, this is about one group per step."""

import triton
import triton.language as tl

from . import noise
from .scan_fused import GROUP, load_logits

_STREAM_SHIFT = tl.constexpr(noise.STREAM_SHIFT)
_GROUP, _TOKEN = tl.constexpr(noise.GROUP), tl.constexpr(noise.TOKEN)
_RECOVERED_GROUP, _RECOVERED_TOKEN = tl.constexpr(noise.RECOVERED_GROUP), tl.constexpr(noise.RECOVERED_TOKEN)
# Sums in another order are rounded differently.
_ROUNDING = tl.constexpr(1.0001)
# Share of p in the residual, 2**-80: see `residual` of reference.py.
_REST = tl.constexpr(8.271806125530277e-25)


@triton.jit
def _splitmix64(state):
    bits = state + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def uniform(key, counters):
    bits = _splitmix64(key + counters.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32
    return tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def exponential(key, counters):
    number = uniform(key, counters)
    # log1p(-number): the second factor corrects the rounding of 1 - number.
    rest = 1.0 - number
    return tl.where(rest == 1.0, number, -tl.log(rest) * (number / (1.0 - rest)))


@triton.jit
def stream_key(seed, position, stream):
    where = position ^ (stream << _STREAM_SHIFT)
    return _splitmix64(_splitmix64(seed.to(tl.uint64)) ^ where.to(tl.uint64))


@triton.jit
def first_of_largest(row_ptr, maxima, vocab_size):
    """Returns the first argmax of a row, from the maxima of its groups; 0 if all are -inf."""
    largest, group = tl.max(maxima, axis=0, return_indices=True)
    tokens = group * GROUP + tl.arange(0, GROUP)
    logits = load_logits(row_ptr, tokens, tokens < vocab_size)
    return group * GROUP + tl.argmax((logits == largest).to(tl.int32), axis=0)


@triton.jit
def weights_of(p, q, scale, tokens):
    row_ptr, vocab_size, limit, maximum, total = p
    logits = load_logits(row_ptr, tokens, tokens < vocab_size)
    p_weights = tl.where(logits >= limit, tl.exp2((logits - maximum) * scale) / total, 0.0)
    q_weights = 0.0
    if q is not None:
        draft_row_ptr, draft_vocab_size, draft_maximum, draft_total = q
        draft_logits = load_logits(draft_row_ptr, tokens, tokens < draft_vocab_size)
        q_weights = tl.exp2((draft_logits - draft_maximum) * scale) / draft_total
    return p_weights, q_weights


@triton.jit
def _residual(p, q, scale, tokens):
    p_weights, q_weights = weights_of(p, q, scale, tokens)
    if q is not None:
        p_weights = tl.maximum(p_weights - q_weights, 0.0) + p_weights * _REST
    return p_weights


@triton.jit
def race(
    # the row, vocab_size, smallest logit that is not cut, largest logit, sum of the weights that are not cut
    p,
    # row, vocab_size, largest logit and sum of weights of the rejected draft; None, or a vocab_size of 0: no draft
    q,
    scale,
    seed,
    position,
    # [GROUPS] from load_scan
    maxima,
    totals,
    GROUPS: tl.constexpr,
):
    """Returns the token that arrives first, with weights max(p - q, 0), or p without a draft."""
    recovers = False
    if q is not None:
        recovers = q[1] > 0
    key = stream_key(seed, position, tl.where(recovers, _RECOVERED_GROUP, _GROUP).to(tl.int64))
    groups, within = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    share = tl.where(recovers, 1.0 + _REST, 1.0)
    rates = tl.where(maxima >= p[2], share * totals / p[4], 0.0) / exponential(key, groups)
    best, winner = -1.0, 0
    bound, group = tl.max(rates, axis=0, return_indices=True)
    while bound * _ROUNDING > best:
        rate = tl.sum(_residual(p, q, scale, group * GROUP + within), axis=0) / exponential(key, group)
        winner = tl.where(rate > best, group, winner)
        best = tl.maximum(rate, best)
        rates = tl.where(groups == group, -2.0, rates)
        bound, group = tl.max(rates, axis=0, return_indices=True)
    tokens = winner * GROUP + within
    key = stream_key(seed, position, tl.where(recovers, _RECOVERED_TOKEN, _TOKEN).to(tl.int64))
    return winner * GROUP + tl.argmax(_residual(p, q, scale, tokens) / exponential(key, tokens), axis=0)
