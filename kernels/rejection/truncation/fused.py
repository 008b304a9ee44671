"""Top-k, top-p and min-p in Triton, without a sort of the vocabulary: the smallest logit that a row keeps.

The maxima and weights of a row's groups bound its threshold from below: k groups with a maximum of t or more have k
tokens that top-k may keep, what maxima above t weigh is above t, and if all tokens were as likely as t and weighed less
than what top-p leaves out, then t is out. So few groups are left to look at, whatever the vocabulary; in them a search
in the floats' own order finds the threshold, two bounds a read, in about 5 reads for bfloat16. (A histogram of weights
needs atomics.) A flat row keeps many groups, maybe all, and costs these reads, but is as exact.
"""

import torch
import triton
import triton.language as tl

from ..arguments import Layout, Parameters, Result, Target, padded_width
from ..race.fused import first_of_largest, race
from ..reference import GROUP_SIZE
from ..result.fused import is_last, write_drawn
from ..scan.fused import LARGEST, Scan, load_position, load_request, load_scan, scale_of

_CHUNK_GROUPS = 16
# Tokens that a lane loads at once: 16 bytes of bfloat16.
_VECTOR = tl.constexpr(8)
# Lower bits of the float32 that logits of a type never use.
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _to_key(logit):
    """The float32's place in the order of floats, int64."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sums(row, a, b, COUNTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Weights, or numbers if COUNTS, of the candidates' tokens not below each of two bounds, in one read."""
    row_ptr, vocab_size, groups_ptr, num_candidates, maximum, scale = row
    # A lane's tokens are summed up as they come, the lanes at the end: warps wait for nothing but memory.
    LANES: tl.constexpr = GROUP_SIZE // _VECTOR
    lanes = tl.arange(0, CHUNK * LANES)
    from_a = tl.zeros([CHUNK * LANES], tl.float32)
    from_b = from_a
    for first in range(0, num_candidates, CHUNK):
        places = first + lanes // LANES
        inside = places < num_candidates
        groups = tl.load(groups_ptr + places, mask=inside, other=0)
        offsets = (groups * GROUP_SIZE + lanes % LANES * _VECTOR)[:, None] + tl.arange(0, _VECTOR)[None, :]
        mask = inside[:, None] & (offsets < vocab_size)
        logits = tl.load(row_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        # NaN is not above any bound, and +inf weighs as much as the maximum.
        weights = tl.exp2((tl.minimum(logits, maximum) - maximum) * scale)
        sizes = tl.full(logits.shape, 1.0, tl.float32) if COUNTS else weights
        from_a += tl.sum(tl.where(logits >= a, sizes, 0.0), axis=1)
        from_b += tl.sum(tl.where(logits >= b, sizes, 0.0), axis=1)
    return tl.sum(from_a, axis=0), tl.sum(from_b, axis=0)


@triton.jit
def _search(
    row, target, floor, limit, total,
    KEY_SHIFT: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Largest float between `floor` and the maximum from which on there is `target` or more, and how much there is.

    At least `limit`; that and `total`, if even from `floor` on there is less. A read leaves a third of the floats.
    """
    # Floats that differ in unused bits alone make a bucket, of which one is a logit.
    start, high = _to_key(tl.maximum(floor, -LARGEST)) >> KEY_SHIFT, _to_key(row[4]) >> KEY_SHIFT
    low = start - 1
    while low < high:
        span = high - low
        a, b = low + (span + 2) // 3, low + (2 * span + 2) // 3
        from_a, from_b = _sums(
            row, tl.maximum(_from_key(a << KEY_SHIFT), limit), tl.maximum(_from_key(b << KEY_SHIFT), limit),
            COUNTS, CHUNK, GROUP_SIZE,
        )  # fmt: skip
        has_a, has_b = from_a >= target, from_b >= target
        low = tl.where(has_b, b, tl.where(has_a, a, low))
        high = tl.where(has_b, high, tl.where(has_a, b, a) - 1)
        total = tl.where(has_b, from_b, tl.where(has_a, from_a, total))
    return tl.where(low < start, limit, tl.maximum(_from_key(low << KEY_SHIFT), limit)), total


@triton.jit
def _nucleus_floor(total, maximum, scale, top_p, vocab_size):
    """A bound of top-p's threshold: if all tokens were this likely, they would weigh what top-p may leave out."""
    # Leaves room for roundings, of sums and of logits.
    depth = tl.minimum(tl.log2(tl.maximum(1.0 - 1.001 * top_p, 0.0) * total / vocab_size) / scale, 0.0)
    return maximum + depth - 1e-6 * (tl.abs(maximum) - depth)


@triton.jit
def _lower_bound(maxima, total, maximum, scale, top_k, top_p, num_groups, GROUPS: tl.constexpr):
    """A bound of top-k's and top-p's thresholds from the groups' maxima [GROUPS]; top_p >= 1: of top-k's alone."""
    ranks = tl.arange(0, GROUPS)
    ordered = tl.sort(maxima, descending=True)
    kth = tl.max(tl.where((ranks == top_k - 1) & (top_k <= num_groups), ordered, float("-inf")), axis=0)
    weights = tl.exp2((ordered - maximum) * scale)
    # The exact test sums in another order: leave room for roundings.
    surely_out = tl.cumsum(weights, axis=0) - weights >= top_p * total * 1.001
    lowest = tl.min(tl.where(surely_out, float("inf"), ordered), axis=0)
    # If no maximum is surely out, tokens below all maxima may be in.
    is_bound = (top_p < 1.0) & (tl.max(surely_out.to(tl.int32), axis=0) == 1)
    return tl.maximum(kth, tl.where(is_bound, lowest, float("-inf")))


@triton.jit
def _truncate(
    row_ptr,
    # room for num_groups int32
    groups_ptr,
    # from load_scan
    maxima,
    totals,
    maximum,
    scale,
    # below 1 or above vocab_size: all tokens
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Smallest logit kept, -inf for all, and the weight of those that are."""
    limit, total = float("-inf"), tl.sum(totals, axis=0)
    top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    if ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)) & (total > 0.0):
        limit = tl.where(min_p > 0.0, maximum + tl.log2(min_p) / scale, float("-inf"))
        # What top-p keeps is a share of all that the others keep: those candidates must not be cut by it.
        has_others = (top_k < vocab_size) | (min_p > 0.0)
        bound = _lower_bound(maxima, total, maximum, scale, top_k, tl.where(has_others, 1.0, top_p), num_groups, GROUPS)
        floor = tl.maximum(limit, bound)
        chosen = (maxima >= floor) & (maxima > float("-inf"))
        num_candidates = tl.sum(chosen.to(tl.int32), axis=0)
        tl.store(groups_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tl.arange(0, GROUPS), mask=chosen)
        tl.debug_barrier()
        row = row_ptr, vocab_size, groups_ptr, num_candidates, maximum, scale
        if top_k < vocab_size:
            limit, _number = _search(row, top_k.to(tl.float32), floor, limit, total, KEY_SHIFT, True, CHUNK, GROUP_SIZE)
        if has_others:
            total, _total = _sums(row, limit, limit, False, CHUNK, GROUP_SIZE)
        if top_p < 1.0:
            floor = tl.maximum(tl.maximum(floor, limit), _nucleus_floor(total, maximum, scale, top_p, vocab_size))
            limit, total = _search(row, top_p * total, floor, limit, total, KEY_SHIFT, False, CHUNK, GROUP_SIZE)
    return limit, total


@triton.jit
def _limits(parameters, given, state, vocab_size):
    """top_k, top_p and min_p of a state; those that keep everything where an array is not given."""
    top_k = tl.load(parameters.top_k + state, mask=(given & 1) != 0, other=vocab_size)
    top_p = tl.load(parameters.top_p + state, mask=(given & 2) != 0, other=1.0)
    min_p = tl.load(parameters.min_p + state, mask=(given & 4) != 0, other=0.0)
    return top_k, top_p, min_p


@triton.jit
def load_kept(
    scanned,
    slot,
    row_ptr,
    # room for num_groups int32 a slot
    groups_ptr,
    parameters,
    given,
    state,
    scale,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """load_scan of a row, the weight that it keeps (1 for a row of -inf alone), and the smallest logit kept."""
    maxima, totals, maximum = load_scan(scanned, slot, num_groups, scale, GROUPS)
    top_k, top_p, min_p = _limits(parameters, given, state, vocab_size)
    limit, total = _truncate(
        row_ptr, groups_ptr + slot * num_groups, maxima, totals, maximum, scale, top_k, top_p, min_p,
        vocab_size, num_groups, GROUPS, GROUP_SIZE, CHUNK, KEY_SHIFT,
    )  # fmt: skip
    return maxima, totals, maximum, tl.maximum(total, 1.0), limit


@triton.jit(do_not_specialize=["given"])
def _draw_kept_kernel(
    result,
    # [num_reqs, width] int32: what each row draws
    token_ptr,
    # same, float32: the smallest logit that it keeps
    limit_ptr,
    # [num_reqs, width, num_groups] int32
    groups_ptr,
    scanned,
    target,
    layout,
    parameters,
    given,
    num_groups,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Draws the token of a row; the last row of a request to be drawn compares them with the drafts."""
    step, request, width = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    if step < num_rows:
        scale = scale_of(temperature)
        row_ptr, slot = target.logits + (begin + step) * target.stride, (request * width + step).to(tl.int64)
        if temperature == 0.0:
            maxima, totals, maximum = load_scan(scanned, slot, num_groups, scale, GROUPS)
            token = first_of_largest(row_ptr, maxima, target.vocab_size, GROUP_SIZE)
            limit = float("-inf")
        else:
            maxima, totals, maximum, total, limit = load_kept(
                scanned, slot, row_ptr, groups_ptr, parameters, given, state, scale, target.vocab_size, num_groups,
                GROUPS, GROUP_SIZE, CHUNK, KEY_SHIFT,
            )  # fmt: skip
            seed, position = tl.load(parameters.seeds + state), load_position(layout, begin + step)
            p = row_ptr, target.vocab_size, limit, maximum, total
            token = race(p, None, scale, 1.0, seed, position, maxima, totals, GROUPS, GROUP_SIZE)
        tl.store(token_ptr + slot, token)
        tl.store(limit_ptr + slot, limit)
    if is_last(scanned.arrivals + request, step, num_rows):
        steps = tl.arange(0, WIDTH)
        tokens = tl.load(token_ptr + request * width + steps, mask=steps < num_rows, other=-1)
        write_drawn(result, layout, request, begin, num_rows, tokens, width, WIDTH)


def constants(num_groups: int, dtype: torch.dtype) -> dict[str, int]:
    """What kernels that truncate are compiled for, by name."""
    return {
        "GROUPS": triton.next_power_of_2(num_groups),
        "GROUP_SIZE": GROUP_SIZE,
        "CHUNK": _CHUNK_GROUPS,
        "KEY_SHIFT": _KEY_SHIFTS[dtype],
    }


def launch(
    result: Result, scanned: Scan, target: Target, layout: Layout, parameters: Parameters, given: int
) -> torch.Tensor:
    """One-hot q after a truncation, in one launch; the smallest logit that each row keeps, [num_reqs, width]."""
    num_reqs, width, num_groups = scanned.maximum.shape
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32)
    token, limit = (torch.empty_like(result.sampled, dtype=dtype) for dtype in (torch.int32, torch.float32))
    _draw_kept_kernel[(width, num_reqs)](
        result, token, limit, groups, scanned, target, layout, parameters, given, num_groups, WIDTH=padded_width(width),
        **constants(num_groups, target.logits.dtype), num_warps=8,
    )  # fmt: skip
    return limit
