"""Top-k, top-p and min-p in Triton, without a sort of the vocabulary: the smallest logit that a row keeps.

The maxima and weights of a row's groups bound its threshold from below: k groups with a maximum of t or more have k
tokens that top-k may keep, and what maxima above t weigh is above t. So few groups are left to look at, whatever the
vocabulary; in them bisection over the floats' own order finds the threshold, in 16 steps for bfloat16. (Over whole rows
that would be 16 reads; a histogram of weights needs atomics and one more read.) A flat row keeps many groups and costs
more, but is as exact.
"""

import torch
import triton
import triton.language as tl

from ..arguments import Layout, Parameters, Result, Target, padded_width
from ..race.fused import first_of_largest, race
from ..reference import GROUP_SIZE
from ..result.fused import is_last, write_drawn
from ..scan.fused import Scan, load_logits, load_request, load_scan, scale_of

_CHUNK_GROUPS = 16
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
def _sum_above(
    row_ptr, groups_ptr, num_candidates, vocab_size, above, limit, maximum, scale,
    COUNTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Weight, or number if COUNTS, of tokens above `above` and not below `limit`, in the groups of the list."""
    result = 0.0
    for first in range(0, num_candidates, CHUNK):
        places = first + tl.arange(0, CHUNK)
        groups = tl.load(groups_ptr + places, mask=places < num_candidates, other=0)
        offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        logits = load_logits(row_ptr, offsets, (places < num_candidates)[:, None] & (offsets < vocab_size))
        sizes = tl.full(logits.shape, 1.0, tl.float32) if COUNTS else tl.exp2((logits - maximum) * scale)
        chosen = (logits > above) & (logits >= limit)
        result += tl.sum(tl.sum(tl.where(chosen, sizes, 0.0), axis=1), axis=0)
    return result


@triton.jit
def _bisect(
    row_ptr, groups_ptr, num_candidates, vocab_size, target, floor, limit, maximum, scale,
    KEY_SHIFT: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Smallest float from `floor` on above which there is less than `target`; at least `limit`."""
    low, high = _to_key(floor) >> KEY_SHIFT, _to_key(maximum) >> KEY_SHIFT
    while low < high:
        middle = (low + high) >> 1
        # Floats that differ in unused bits alone make a bucket: this is its largest.
        bound = _from_key(((middle + 1) << KEY_SHIFT) - 1)
        found = _sum_above(
            row_ptr, groups_ptr, num_candidates, vocab_size, bound, limit, maximum, scale, COUNTS, CHUNK, GROUP_SIZE
        )
        is_less = found < target
        high = tl.where(is_less, middle, high)
        low = tl.where(is_less, low, middle + 1)
    return tl.maximum(_from_key(low << KEY_SHIFT), limit)


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
        if top_k < vocab_size:
            limit = _bisect(
                row_ptr, groups_ptr, num_candidates, vocab_size, top_k.to(tl.float32), floor, limit, maximum, scale,
                KEY_SHIFT, True, CHUNK, GROUP_SIZE,
            )  # fmt: skip
        if has_others:
            total = _sum_above(
                row_ptr, groups_ptr, num_candidates, vocab_size, float("-inf"), limit, maximum, scale,
                False, CHUNK, GROUP_SIZE,
            )  # fmt: skip
        if top_p < 1.0:
            limit = _bisect(
                row_ptr, groups_ptr, num_candidates, vocab_size, top_p * total, tl.maximum(floor, limit), limit,
                maximum, scale, KEY_SHIFT, False, CHUNK, GROUP_SIZE,
            )  # fmt: skip
            total = _sum_above(
                row_ptr, groups_ptr, num_candidates, vocab_size, float("-inf"), limit, maximum, scale,
                False, CHUNK, GROUP_SIZE,
            )  # fmt: skip
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
        else:
            maxima, totals, maximum, total, limit = load_kept(
                scanned, slot, row_ptr, groups_ptr, parameters, given, state, scale, target.vocab_size, num_groups,
                GROUPS, GROUP_SIZE, CHUNK, KEY_SHIFT,
            )  # fmt: skip
            seed, position = tl.load(parameters.seeds + state), tl.load(layout.positions + begin + step)
            p = row_ptr, target.vocab_size, limit, maximum, total
            token = race(p, None, scale, 1.0, seed, position, maxima, totals, GROUPS, GROUP_SIZE)
        tl.store(token_ptr + slot, token)
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


def launch(result: Result, scanned: Scan, target: Target, layout: Layout, parameters: Parameters, given: int) -> None:
    """One-hot q behind a truncation, in one launch."""
    num_reqs, width, num_groups = scanned.maximum.shape
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32)
    token = torch.empty_like(result.sampled, dtype=torch.int32)
    _draw_kept_kernel[(width, num_reqs)](
        result, token, groups, scanned, target, layout, parameters, given, num_groups, WIDTH=padded_width(width),
        **constants(num_groups, target.logits.dtype), num_warps=8,
    )  # fmt: skip
