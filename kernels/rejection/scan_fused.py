"""The scan in Triton, and device functions that read requests, logits and the result of a scan."""

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
    """The result of a scan of the target's rows; with a dense q, the drafts' rows follow."""

    # [num_rows, num_groups] float32: largest logit of the group; +inf for a draft's group with NaN or +inf
    maximum: torch.Tensor
    # same: sum of the group's weights, of which the largest is 1
    total: torch.Tensor
    # [num_reqs] int32, 0 for requests with rows: the programs of the next launch count themselves there
    arrivals: torch.Tensor
    num_groups: int


@triton.jit
def load_request(layout, parameters, request):
    begin = tl.load(layout.cu_num_logits + request).to(tl.int64)
    num_rows = (tl.load(layout.cu_num_logits + request + 1) - begin).to(tl.int32)
    state = tl.load(layout.idx_mapping + request).to(tl.int64)
    return begin, num_rows, state, tl.load(parameters.temperature + state)


@triton.jit
def load_logits(row_ptr, offsets, mask):
    """Loads float32 logits of a row; NaN counts as -inf, +inf as the largest float32."""
    logits = tl.load(row_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(logits != logits, float("-inf"), logits), LARGEST)


@triton.jit
def finite_maximum(maximum):
    """Returns the maximum, or 0 for -inf, since -inf minus -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def scale_of(temperature):
    """Returns the factor from logits to exponents of 2; temperature 0 counts as 1."""
    return LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _request_of(cu_num_logits_ptr, row, num_reqs):
    """Returns the last request that begins at or before a row: the row's request, if it has one."""
    low, high = 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(cu_num_logits_ptr + middle) <= row
        low, high = tl.where(is_after, middle, low), tl.where(is_after, high, middle)
    return low


@triton.jit(do_not_specialize=["num_reqs", "num_logits", "num_tiles"])
def _scan_kernel(
    scanned,
    target,
    # Drafts, or None
    drafts,
    layout,
    parameters,
    num_reqs,
    num_logits,
    num_tiles,
):
    place, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    row, is_draft = place, False
    if drafts is not None:
        row, is_draft = place % num_logits, place >= num_logits
    groups = tile * _TILE_GROUPS + tl.arange(0, _TILE_GROUPS)
    offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # These loads are under way during the search for the request.
    mask = (offsets < target.vocab_size) & (not is_draft)
    logits = load_logits(target.logits + row.to(tl.int64) * target.stride, offsets, mask)
    request = _request_of(layout.cu_num_logits, row, num_reqs)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    step = (row - begin).to(tl.int32)
    if step + is_draft >= num_rows:
        return
    if (tile == 0) & (step == 0):
        tl.store(scanned.arrivals + request, 0)
    if drafts is not None and is_draft:
        row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
        logits = tl.load(row_ptr + offsets, mask=offsets < drafts.vocab_size, other=float("-inf")).to(tl.float32)
        logits = tl.where(logits != logits, float("inf"), logits)
    maximum = tl.max(logits, axis=1)
    total = tl.sum(tl.exp2((logits - finite_maximum(maximum)[:, None]) * scale_of(temperature)), axis=1)
    slots = place.to(tl.int64) * scanned.num_groups + groups
    tl.store(scanned.maximum + slots, maximum, mask=groups < scanned.num_groups)
    tl.store(scanned.total + slots, total, mask=groups < scanned.num_groups)


@triton.jit
def load_scan(scanned, slot, scale, GROUPS: tl.constexpr):
    """Loads the maxima and weights [GROUPS] of a row's groups, relative to the row's maximum, which is the third
    result."""
    groups = tl.arange(0, GROUPS)
    slots = slot.to(tl.int64) * scanned.num_groups + groups
    maxima = tl.load(scanned.maximum + slots, mask=groups < scanned.num_groups, other=float("-inf"))
    totals = tl.load(scanned.total + slots, mask=groups < scanned.num_groups, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=0))
    return maxima, totals * tl.exp2((maxima - maximum) * scale), maximum


def scan(target: Target, drafts: Drafts | None, layout: Layout, parameters: Parameters) -> Scan:
    num_reqs, num_logits, device = len(layout.idx_mapping), len(target.logits), target.logits.device
    shape = num_logits * (1 if drafts is None else 2), triton.cdiv(target.vocab_size, GROUP_SIZE)
    maximum, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    scanned = Scan(maximum, total, torch.empty(num_reqs, dtype=torch.int32, device=device), shape[1])
    num_tiles = triton.cdiv(target.vocab_size, TILE_SIZE)
    _scan_kernel[(num_tiles * shape[0],)](
        scanned, target, drafts, Layout(*layout[:4]), parameters, num_reqs, num_logits, num_tiles, num_warps=8
    )
    return scanned
