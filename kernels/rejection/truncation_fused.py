"""Thresholds of top-k, top-p and min-p in Triton, without a sort of the vocabulary. The maxima and weights of a row's
groups bound its threshold t from below. For top-k, k groups with a maximum of at least t hold k tokens. For top-p,
either the tokens at maxima above t already have the required weight, or t is so small that all tokens at t together
weigh less than top-p may cut. Few groups remain for any vocabulary. A search in the order of floats then computes the
threshold, with two bounds per read, in about 5 reads for bfloat16. (A histogram of weights would need atomics.) In a
flat row many groups remain, and the search reads all of them; the result is just as exact."""

import triton
import triton.language as tl

from .scan_fused import GROUP, LARGEST, load_scan

_CHUNK_BYTES = tl.constexpr(32)  # groups read at a time, times the bytes of a logit
_VECTOR = tl.constexpr(8)  # tokens that a lane loads at once


@triton.jit
def _to_key(logit):
    """Returns the float32's place in the order of floats, int64."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sums(row, a, b, COUNTS: tl.constexpr):
    """Returns weights, or numbers if COUNTS, of the candidates' tokens not below each of two bounds, in one read."""
    row_ptr, vocab_size, groups_ptr, num_candidates, maximum, scale = row
    # Lanes are summed up at the end, so warps wait for memory alone.
    LANES: tl.constexpr = GROUP // _VECTOR
    CHUNK: tl.constexpr = _CHUNK_BYTES * 8 // row_ptr.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, CHUNK * LANES)
    from_a = tl.zeros([CHUNK * LANES], tl.float32)
    from_b = from_a
    for first in range(0, num_candidates, CHUNK):
        places = first + lanes // LANES
        inside = places < num_candidates
        groups = tl.load(groups_ptr + places, mask=inside, other=0)
        offsets = (groups * GROUP + lanes % LANES * _VECTOR)[:, None] + tl.arange(0, _VECTOR)[None, :]
        mask = inside[:, None] & (offsets < vocab_size)
        logits = tl.load(row_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        # NaN is not above any bound, and +inf weighs as much as the maximum.
        weights = tl.exp2((tl.minimum(logits, maximum) - maximum) * scale)
        sizes = tl.full(logits.shape, 1.0, tl.float32) if COUNTS else weights
        from_a += tl.sum(tl.where(logits >= a, sizes, 0.0), axis=1)
        from_b += tl.sum(tl.where(logits >= b, sizes, 0.0), axis=1)
    return tl.sum(from_a, axis=0), tl.sum(from_b, axis=0)


@triton.jit
def _search(row, target, floor, limit, total, COUNTS: tl.constexpr):
    """Returns the largest float from `floor` to the maximum above which the sum reaches `target`, and that sum; at
    least `limit`, and `limit` and `total` where the sum is smaller from `floor` on. A read leaves a third of the
    floats."""
    # Floats that differ only in bits that the logits' type lacks are one bucket.
    dtype: tl.constexpr = row[0].dtype.element_ty
    SHIFT: tl.constexpr = 16 if dtype == tl.bfloat16 else 13 if dtype == tl.float16 else 0
    start, high = _to_key(tl.maximum(floor, -LARGEST)) >> SHIFT, _to_key(row[4]) >> SHIFT
    low = start - 1
    while low < high:
        span = high - low
        a, b = low + (span + 2) // 3, low + (2 * span + 2) // 3
        at_a, at_b = tl.maximum(_from_key(a << SHIFT), limit), tl.maximum(_from_key(b << SHIFT), limit)
        from_a, from_b = _sums(row, at_a, at_b, COUNTS)
        has_a, has_b = from_a >= target, from_b >= target
        low = tl.where(has_b, b, tl.where(has_a, a, low))
        high = tl.where(has_b, high, tl.where(has_a, b, a) - 1)
        total = tl.where(has_b, from_b, tl.where(has_a, from_a, total))
    return tl.where(low < start, limit, tl.maximum(_from_key(low << SHIFT), limit)), total


@triton.jit
def _nucleus_floor(total, maximum, scale, top_p, vocab_size):
    """Bounds top-p's threshold from below by the logit at which all tokens together weigh as much as top-p may cut."""
    # Leaves room for the rounding of sums and logits.
    depth = tl.minimum(tl.log2(tl.maximum(1.0 - 1.001 * top_p, 0.0) * total / vocab_size) / scale, 0.0)
    return maximum + depth - 1e-6 * (tl.abs(maximum) - depth)


@triton.jit
def _lower_bound(maxima, total, maximum, scale, top_k, top_p, GROUPS: tl.constexpr):
    """Bounds the thresholds of top-k and, below 1, top-p from below by the groups' maxima [GROUPS]."""
    ranks = tl.arange(0, GROUPS)
    ordered = tl.sort(maxima, descending=True)
    kth = tl.max(tl.where(ranks == top_k - 1, ordered, float("-inf")), axis=0)
    weights = tl.exp2((ordered - maximum) * scale)
    # The exact test sums in another order: leaves room for rounding.
    surely_out = tl.cumsum(weights, axis=0) - weights >= top_p * total * 1.001
    lowest = tl.min(tl.where(surely_out, float("inf"), ordered), axis=0)
    # If no maximum is surely out, tokens below all maxima may be in.
    is_bound = (top_p < 1.0) & (tl.max(surely_out.to(tl.int32), axis=0) == 1)
    return tl.maximum(kth, tl.where(is_bound, lowest, float("-inf")))


@triton.jit
def load_kept(
    scanned,
    slot,
    row_ptr,
    # room for num_groups int32 a slot
    groups_ptr,
    parameters,
    # see parameters_of
    given,
    state,
    scale,
    vocab_size,
    GROUPS: tl.constexpr,
):
    """Returns load_scan of a row, the weight of the tokens that no limit cuts (1 for a row of -inf alone), and the
    threshold."""
    maxima, totals, maximum = load_scan(scanned, slot, scale, GROUPS)
    limit, total = float("-inf"), tl.sum(totals, axis=0)
    top_k = tl.load(parameters.top_k + state, mask=(given & 1) != 0, other=vocab_size)
    top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    top_p = tl.load(parameters.top_p + state, mask=(given & 2) != 0, other=1.0)
    min_p = tl.load(parameters.min_p + state, mask=(given & 4) != 0, other=0.0)
    if ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)) & (total > 0.0):
        limit = tl.where(min_p > 0.0, maximum + tl.log2(min_p) / scale, float("-inf"))
        # Top-p is a share of the weight that the others leave, so it must not bound that.
        has_others = (top_k < vocab_size) | (min_p > 0.0)
        bound = _lower_bound(maxima, total, maximum, scale, top_k, tl.where(has_others, 1.0, top_p), GROUPS)
        floor = tl.maximum(limit, bound)
        chosen = (maxima >= floor) & (maxima > float("-inf"))
        num_candidates = tl.sum(chosen.to(tl.int32), axis=0)
        groups_ptr += slot * scanned.num_groups
        tl.store(groups_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tl.arange(0, GROUPS), mask=chosen)
        tl.debug_barrier()
        row = row_ptr, vocab_size, groups_ptr, num_candidates, maximum, scale
        if top_k < vocab_size:
            limit, _number = _search(row, top_k.to(tl.float32), floor, limit, total, True)
        if has_others:
            total, _total = _sums(row, limit, limit, False)
        if top_p < 1.0:
            floor = tl.maximum(tl.maximum(floor, limit), _nucleus_floor(total, maximum, scale, top_p, vocab_size))
            limit, total = _search(row, top_p * total, floor, limit, total, False)
    return maxima, totals, maximum, tl.maximum(total, 1.0), limit
