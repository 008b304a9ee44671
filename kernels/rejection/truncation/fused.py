"""Top-k, top-p and min-p in Triton, without a sort of the vocabulary; thresholds and draws of all rows.

`scan_kernel` reads the logits once and leaves each group's maximum and weight. They bound a row's threshold from below:
k groups with a maximum of t or more have k tokens that top-k may keep, and what maxima above t weigh is above t. So few
groups are left to look at, whatever the vocabulary; in them bisection over the floats' own order finds the threshold,
in 16 steps for bfloat16. (Over whole rows that would be 16 reads; a histogram of weights needs atomics and one more
read.) A flat row keeps many groups and costs more, but is as exact.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import Sampling
from ..fused import _GROUP, _LOG2_E, _TOKEN, TILE_SIZE, finite_maximum, load_logits
from ..noise.fused import exponential, stream_key
from ..reference import GROUP_SIZE

_CHUNK_GROUPS = 16
# Lower bits of the float32 that logits of a type never use.
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Stats(NamedTuple):
    """What rows leave, in parts [num_reqs, width, num_parts]: tiles, groups, or one for the whole row."""

    # float32: largest logit
    maximum: torch.Tensor
    # float32: sum of the weights, the largest one's being 1
    total: torch.Tensor
    # int32: first of the most probable tokens (only at temperature 0), or the token drawn (of a whole row)
    token: torch.Tensor
    # float32: smallest logit kept; None: all
    limit: Any = None


@triton.jit
def scan_kernel(
    maximum_ptr,
    total_ptr,
    token_ptr,
    # [num_logits, vocab_size], or [num_states, width, vocab_size] if IS_DRAFT
    logits_ptr,
    logits_stride,
    step_stride,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    vocab_size,
    num_parts,
    IS_DRAFT: tl.constexpr,
    PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
):
    """Statistics of PARTS parts of a row, of PART_SIZE tokens each."""
    tile, step, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(cu_num_logits_ptr + request).to(tl.int64) + step
    num_bonus = 1 if IS_DRAFT else 0
    if row + num_bonus >= tl.load(cu_num_logits_ptr + request + 1):
        return
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    scale = _LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)
    row_ptr = logits_ptr + (state * logits_stride + step * step_stride if IS_DRAFT else row * logits_stride)
    parts = tile * PARTS + tl.arange(0, PARTS)
    offsets = parts[:, None] * PART_SIZE + tl.arange(0, PART_SIZE)[None, :]
    logits = load_logits(row_ptr, offsets, offsets < vocab_size)
    maximum = tl.max(logits, axis=1)
    total = tl.sum(tl.exp2((logits - finite_maximum(maximum)[:, None]) * scale), axis=1)
    slots = (request * tl.num_programs(1) + step).to(tl.int64) * num_parts + parts
    tl.store(maximum_ptr + slots, maximum, mask=parts < num_parts)
    tl.store(total_ptr + slots, total, mask=parts < num_parts)
    if temperature == 0.0:
        first = tl.min(tl.where(logits == maximum[:, None], offsets, vocab_size), axis=1)
        tl.store(token_ptr + slots, first, mask=parts < num_parts)


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
def _load_chunk(row_ptr, groups_ptr, first, num_candidates, vocab_size, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Groups [CHUNK] from the list, and their logits [CHUNK, GROUP_SIZE]."""
    places = first + tl.arange(0, CHUNK)
    groups = tl.load(groups_ptr + places, mask=places < num_candidates, other=0)
    offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = (places < num_candidates)[:, None] & (offsets < vocab_size)
    return groups, load_logits(row_ptr, offsets, inside)


@triton.jit
def _sum_above(
    row_ptr, groups_ptr, num_candidates, vocab_size, above, limit, maximum, scale,
    COUNTS: tl.constexpr, CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Weight, or number if COUNTS, of the candidates that are above `above` and not below `limit`."""
    result = 0.0
    for first in range(0, num_candidates, CHUNK):
        _, logits = _load_chunk(row_ptr, groups_ptr, first, num_candidates, vocab_size, CHUNK, GROUP_SIZE)
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
def _draw_candidate(
    row_ptr, groups_ptr, num_candidates, vocab_size, limit, maximum, scale, key,
    CHUNK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """The group that wins among the candidates, by its tokens from `limit` on."""
    best, winner = -1.0, 0
    for first in range(0, num_candidates, CHUNK):
        groups, logits = _load_chunk(row_ptr, groups_ptr, first, num_candidates, vocab_size, CHUNK, GROUP_SIZE)
        weights = tl.where(logits >= limit, tl.exp2((logits - maximum) * scale), 0.0)
        rates = tl.sum(weights, axis=1) / exponential(key, groups)
        rates = tl.where(first + tl.arange(0, CHUNK) < num_candidates, rates, -1.0)
        rate, place = tl.max(rates, axis=0, return_indices=True)
        group = tl.sum(tl.where(tl.arange(0, CHUNK) == place, groups, 0), axis=0)
        winner = tl.where(rate > best, group, winner)
        best = tl.maximum(rate, best)
    return winner


@triton.jit
def _truncate_kernel(
    # [num_reqs, width] each: the fields of Stats
    maximum_ptr,
    total_ptr,
    token_ptr,
    limit_ptr,
    # [num_reqs, width, num_groups] int32: a row's list of groups to look at
    candidates_ptr,
    # [num_reqs, width, num_groups] float32: what scan_kernel left
    group_maximum_ptr,
    group_total_ptr,
    logits_ptr,
    logits_stride,
    cu_num_logits_ptr,
    positions_ptr,
    idx_mapping_ptr,
    # [num_states]; the last three may be None
    temperature_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Threshold, total and a drawn token of a row."""
    step, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_num_logits_ptr + request).to(tl.int64) + step
    if row >= tl.load(cu_num_logits_ptr + request + 1):
        return
    state = tl.load(idx_mapping_ptr + request)
    temperature = tl.load(temperature_ptr + state)
    scale = _LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)
    top_k = vocab_size if top_k_ptr is None else tl.load(top_k_ptr + state)
    top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    top_p = 1.0 if top_p_ptr is None else tl.load(top_p_ptr + state)
    min_p = 0.0 if min_p_ptr is None else tl.load(min_p_ptr + state)
    slot = (request * tl.num_programs(0) + step).to(tl.int64)
    row_ptr, groups_ptr = logits_ptr + row * logits_stride, candidates_ptr + slot * num_groups
    groups = tl.arange(0, GROUPS)
    maxima = tl.load(group_maximum_ptr + slot * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    totals = tl.load(group_total_ptr + slot * num_groups + groups, mask=groups < num_groups, other=0.0)
    largest = tl.max(maxima, axis=0)
    maximum = finite_maximum(largest)
    totals *= tl.exp2((maxima - maximum) * scale)
    total = tl.sum(totals, axis=0)
    seed, position = tl.load(seeds_ptr + state), tl.load(positions_ptr + row)
    key = stream_key(seed, position, _GROUP)
    limit = float("-inf")
    if (top_k == vocab_size) & (top_p >= 1.0) & (min_p <= 0.0) | (temperature == 0.0) | (total == 0.0):
        winner = tl.argmax(tl.where(temperature == 0.0, maxima, totals / exponential(key, groups)), axis=0)
    else:
        limit = tl.where(min_p > 0.0, maximum + tl.log2(min_p) / scale, float("-inf"))
        # What top-p keeps is a share of all that the others keep: those candidates must not be cut by it.
        has_others = (top_k < vocab_size) | (min_p > 0.0)
        bound = _lower_bound(maxima, total, maximum, scale, top_k, tl.where(has_others, 1.0, top_p), num_groups, GROUPS)
        floor = tl.maximum(limit, bound)
        chosen = (maxima >= floor) & (maxima > float("-inf"))
        num_candidates = tl.sum(chosen.to(tl.int32), axis=0)
        tl.store(groups_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, groups, mask=chosen)
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
        winner = _draw_candidate(
            row_ptr, groups_ptr, num_candidates, vocab_size, limit, maximum, scale, key, CHUNK, GROUP_SIZE
        )
    tokens = winner * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    logits = load_logits(row_ptr, tokens, tokens < vocab_size)
    weights = tl.where(logits >= limit, tl.exp2((logits - maximum) * scale), 0.0)
    rates = weights / exponential(stream_key(seed, position, _TOKEN), tokens)
    rates = tl.where(temperature == 0.0, (logits == largest).to(tl.float32), rates)
    tl.store(maximum_ptr + slot, largest)
    tl.store(total_ptr + slot, total)
    tl.store(token_ptr + slot, winner * GROUP_SIZE + tl.argmax(rates, axis=0))
    tl.store(limit_ptr + slot, limit)


def scan(
    logits: torch.Tensor,  # [num_logits, vocab_size], or [num_states, >= width, vocab_size] of drafts
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    width: int,
    part_size: int,
) -> Stats:
    """Statistics of all rows in parts of this many tokens, at most TILE_SIZE."""
    shape = len(idx_mapping), width, triton.cdiv(logits.shape[-1], part_size)
    maximum, total = (logits.new_empty(shape, dtype=torch.float32) for _ in range(2))
    token = logits.new_empty(shape, dtype=torch.int32)
    scan_kernel[(triton.cdiv(logits.shape[-1], TILE_SIZE), width, shape[0])](
        maximum, total, token, logits, logits.stride(0), logits.stride(1), cu_num_logits, idx_mapping, temperature,
        logits.shape[-1], shape[2], IS_DRAFT=logits.ndim == 3, PARTS=TILE_SIZE // part_size, PART_SIZE=part_size,
        num_warps=8,
    )  # fmt: skip
    return Stats(maximum, total, token)


def launch(
    target_logits: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    sampling: Sampling,
    width: int,
) -> Stats:
    """Statistics of the rows, each in one part, and the tokens drawn from them."""
    groups = scan(target_logits, cu_num_logits, idx_mapping, sampling.temperature, width, GROUP_SIZE)
    num_reqs, _, num_groups = groups.maximum.shape
    maximum, total, limit = (target_logits.new_empty(num_reqs, width, 1, dtype=torch.float32) for _ in range(3))
    token = target_logits.new_empty(num_reqs, width, 1, dtype=torch.int32)
    # The scan's room for tokens of greedy requests, which this needs not.
    candidates = groups.token
    _truncate_kernel[(width, num_reqs)](
        maximum, total, token, limit, candidates, groups.maximum, groups.total, target_logits, target_logits.stride(0),
        cu_num_logits, positions, idx_mapping, sampling.temperature, sampling.seeds, sampling.top_k, sampling.top_p,
        sampling.min_p, target_logits.shape[-1], num_groups, GROUPS=triton.next_power_of_2(num_groups),
        GROUP_SIZE=GROUP_SIZE, CHUNK=_CHUNK_GROUPS, KEY_SHIFT=_KEY_SHIFTS[target_logits.dtype], num_warps=8,
    )  # fmt: skip
    return Stats(maximum, total, token, limit)
