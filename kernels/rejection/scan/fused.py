"""The scan in Triton, and how kernels read logits and what a scan left."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference import GROUP_SIZE

TILE_SIZE = 8192
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2_E = tl.constexpr(1.4426950408889634)


class Scan(NamedTuple):
    """What a scan leaves of the rows of each request: `width` of the target, then width - 1 of its draft, if any."""

    # [num_reqs, num_rows, num_groups] float32: largest logit of the group
    maximum: torch.Tensor
    # same: sum of the group's weights, the largest one's being 1
    total: torch.Tensor
    # [num_reqs] int32, all 0: for the programs of the next launch to count themselves
    arrivals: torch.Tensor


@triton.jit
def tidy(logits):
    """NaN counts as -inf, +inf as the largest float32."""
    return tl.minimum(tl.where(logits != logits, float("-inf"), logits), _LARGEST)


@triton.jit
def load_logits(row_ptr, offsets, mask):
    """Tidy float32 logits of a row."""
    return tidy(tl.load(row_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32))


@triton.jit
def finite_maximum(maximum):
    """What may be subtracted from logits that have this maximum: -inf less -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def scale_of(temperature):
    """What turns logits into bits; of a greedy row as at temperature 1."""
    return LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _scan_kernel(
    maximum_ptr,
    total_ptr,
    arrivals_ptr,
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_states, >= width - 1, draft_vocab_size], or None
    draft_logits_ptr,
    draft_state_stride,
    draft_step_stride,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    vocab_size,
    draft_vocab_size,
    num_groups,
    width,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """One tile of a row, GROUPS groups of it."""
    tile, place, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if (tile == 0) & (place == 0):
        tl.store(arrivals_ptr + request, 0)
    begin, end = tl.load(cu_num_logits_ptr + request).to(tl.int64), tl.load(cu_num_logits_ptr + request + 1)
    is_draft = place >= width
    # A draft's first row stands beside the request's first, and there is one less.
    step = tl.where(is_draft, place - width, place)
    if begin + step + is_draft.to(tl.int32) >= end:
        return
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    scale = scale_of(tl.load(temperature_ptr + state))
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    if draft_logits_ptr is not None and is_draft:
        row_ptr = draft_logits_ptr + state * draft_state_stride + step * draft_step_stride
        logits = load_logits(row_ptr, offsets, offsets < draft_vocab_size)
    else:
        logits = load_logits(logits_ptr + (begin + step) * logits_stride, offsets, offsets < vocab_size)
    maximum = tl.max(logits, axis=1)
    total = tl.sum(tl.exp2((logits - finite_maximum(maximum)[:, None]) * scale), axis=1)
    slots = (request * tl.num_programs(1) + place).to(tl.int64) * num_groups + groups
    tl.store(maximum_ptr + slots, maximum, mask=groups < num_groups)
    tl.store(total_ptr + slots, total, mask=groups < num_groups)


@triton.jit
def load_scan(maximum_ptr, total_ptr, slot, num_groups, scale, GROUPS: tl.constexpr):
    """Of a row: the groups' maxima and weights [GROUPS], the weights relative to its maximum, which comes third."""
    groups = tl.arange(0, GROUPS)
    slots = slot.to(tl.int64) * num_groups + groups
    maxima = tl.load(maximum_ptr + slots, mask=groups < num_groups, other=float("-inf"))
    totals = tl.load(total_ptr + slots, mask=groups < num_groups, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=0))
    return maxima, totals * tl.exp2((maxima - maximum) * scale), maximum


def scan(
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    draft_logits: torch.Tensor | None,  # [num_states, >= width - 1, <= vocab_size]
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    width: int,
) -> Scan:
    """Scans all rows in one launch."""
    num_reqs, vocab_size = len(idx_mapping), target_logits.shape[-1]
    num_rows = width if draft_logits is None else 2 * width - 1
    shape = num_reqs, num_rows, triton.cdiv(vocab_size, GROUP_SIZE)
    maximum, total = (target_logits.new_empty(shape, dtype=torch.float32) for _ in range(2))
    arrivals = target_logits.new_empty(num_reqs, dtype=torch.int32)
    draft = (None, 0, 0) if draft_logits is None else (draft_logits, *draft_logits.stride()[:2])
    _scan_kernel[(triton.cdiv(vocab_size, TILE_SIZE), num_rows, num_reqs)](
        maximum, total, arrivals, target_logits, target_logits.stride(0), *draft, cu_num_logits, idx_mapping,
        temperature, vocab_size, 0 if draft_logits is None else draft_logits.shape[-1], shape[2], width,
        GROUPS=TILE_SIZE // GROUP_SIZE, GROUP_SIZE=GROUP_SIZE, num_warps=8,
    )  # fmt: skip
    return Scan(maximum, total, arrivals)
