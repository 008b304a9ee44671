"""The scan in Triton, and how kernels read requests, logits and what a scan left."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import Layout
from .arguments import Drafts, Parameters, Target
from .reference import GROUP_SIZE

TILE_SIZE = 8192
GROUP = tl.constexpr(GROUP_SIZE)  # tokens
_TILE_GROUPS = tl.constexpr(TILE_SIZE // GROUP_SIZE)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2_E = tl.constexpr(1.4426950408889634)


class Scan(NamedTuple):
    """What a scan leaves of the rows of each request: `width` of the target, then width - 1 of its draft, if any."""

    # [num_reqs, num_rows, num_groups] float32: largest logit of the group; of a draft's with NaN or +inf, +inf
    maximum: torch.Tensor
    # same: sum of the group's weights, the largest one's being 1
    total: torch.Tensor
    # [num_reqs] int32, all 0: for the programs of the next launch to count themselves
    arrivals: torch.Tensor
    num_groups: int


@triton.jit
def load_request(layout, parameters, request):
    """First row and number of rows of a request, its state and its temperature."""
    begin = tl.load(layout.cu_num_logits + request).to(tl.int64)
    num_rows = (tl.load(layout.cu_num_logits + request + 1) - begin).to(tl.int32)
    state = tl.load(layout.idx_mapping + request).to(tl.int64)
    return begin, num_rows, state, tl.load(parameters.temperature + state)


@triton.jit
def load_logits(row_ptr, offsets, mask):
    """float32 logits of a row; NaN counts as -inf, +inf as the largest float32."""
    logits = tl.load(row_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(logits != logits, float("-inf"), logits), LARGEST)


@triton.jit
def finite_maximum(maximum):
    """What may be subtracted from logits that have this maximum: -inf less -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def scale_of(temperature):
    """What turns logits into bits; of a greedy row as at temperature 1."""
    return LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit(do_not_specialize=["width"])
def _scan_kernel(
    scanned,
    target,
    # Drafts, or None
    drafts,
    layout,
    parameters,
    width,
):
    """One tile of a row."""
    tile, place, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if (tile == 0) & (place == 0):
        tl.store(scanned.arrivals + request, 0)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    is_draft = place >= width
    # A draft's first row stands beside the request's first, and there is one less.
    step = tl.where(is_draft, place - width, place)
    if step + is_draft.to(tl.int32) >= num_rows:
        return
    groups = tile * _TILE_GROUPS + tl.arange(0, _TILE_GROUPS)
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if drafts is not None and is_draft:
        row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
        logits = tl.load(row_ptr + offsets, mask=offsets < drafts.vocab_size, other=float("-inf")).to(tl.float32)
        logits = tl.where(logits != logits, float("inf"), logits)
    else:
        logits = load_logits(target.logits + (begin + step) * target.stride, offsets, offsets < target.vocab_size)
    maximum = tl.max(logits, axis=1)
    total = tl.sum(tl.exp2((logits - finite_maximum(maximum)[:, None]) * scale_of(temperature)), axis=1)
    slots = (request * tl.num_programs(1) + place).to(tl.int64) * scanned.num_groups + groups
    tl.store(scanned.maximum + slots, maximum, mask=groups < scanned.num_groups)
    tl.store(scanned.total + slots, total, mask=groups < scanned.num_groups)


@triton.jit
def load_scan(scanned, slot, scale, GROUPS: tl.constexpr):
    """Of a row: the groups' maxima and weights [GROUPS], the weights relative to its maximum, which comes third."""
    groups = tl.arange(0, GROUPS)
    slots = slot.to(tl.int64) * scanned.num_groups + groups
    maxima = tl.load(scanned.maximum + slots, mask=groups < scanned.num_groups, other=float("-inf"))
    totals = tl.load(scanned.total + slots, mask=groups < scanned.num_groups, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=0))
    return maxima, totals * tl.exp2((maxima - maximum) * scale), maximum


def scan(target: Target, drafts: Drafts | None, layout: Layout, parameters: Parameters, width: int) -> Scan:
    """Scans all rows in one launch."""
    num_reqs, device = len(layout.idx_mapping), target.logits.device
    num_rows = width if drafts is None else 2 * width - 1
    shape = num_reqs, num_rows, triton.cdiv(target.vocab_size, GROUP_SIZE)
    maximum, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    scanned = Scan(maximum, total, torch.empty(num_reqs, dtype=torch.int32, device=device), shape[2])
    _scan_kernel[(triton.cdiv(target.vocab_size, TILE_SIZE), num_rows, num_reqs)](
        scanned, target, drafts, Layout(*layout[:4]), parameters, width, num_warps=8
    )
    return scanned
