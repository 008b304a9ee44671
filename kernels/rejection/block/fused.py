"""Block verification in Triton, after a scan and a weighing of the drafts; see reference.py for the algorithm.

A third launch reads the logits once more: a program sums up one tile of a residual max(ratio * p - q, 0), in the joint
ratio of the drafts before; the last program of a request decides.
"""

import torch
import triton
import triton.language as tl

from .. import Sampling
from ..arguments import drafts_of, layout_of, new_result, padded_width, parameters_of, target_of
from ..dense.fused import weigh, write_accepted
from ..noise.fused import stream_key, uniform
from ..noise.reference import BLOCK
from ..reference import GROUP_SIZE
from ..result.fused import is_last
from ..scan.fused import TILE_SIZE, load_logits, load_request, scale_of, scan

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _residual(
    weighed, place, joint, row_ptr, draft_row_ptr, target, drafts, scale, tile, TILE_SIZE: tl.constexpr
):  # fmt: skip
    """Sum of max(joint * p - q, 0) over a tile of a row."""
    tokens = tile * TILE_SIZE + tl.arange(0, TILE_SIZE)
    logits = load_logits(row_ptr, tokens, tokens < target.vocab_size)
    p = tl.exp2((logits - tl.load(weighed.maximum + place)) * scale) / tl.load(weighed.total + place)
    p = tl.where(logits >= tl.load(weighed.limit + place), p, 0.0)
    logits = load_logits(draft_row_ptr, tokens, tokens < drafts.vocab_size)
    q = tl.exp2((logits - tl.load(weighed.draft_maximum + place)) * scale) / tl.load(weighed.draft_total + place)
    return tl.sum(tl.maximum(joint * p - q, 0.0), axis=0)


@triton.jit
def _keep_kernel(
    result,
    # [num_reqs, width, num_tiles] float32: a tile's residual
    rest_ptr,
    weighed,
    scanned,
    target,
    drafts,
    layout,
    parameters,
    num_groups,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    """Sums up a tile of a row; the last tile of a request keeps drafts and draws."""
    tile, step, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tiles, width = tl.num_programs(0), tl.num_programs(1) + 1
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    first = request * width
    if (step < num_rows - 1) & (temperature > 0.0):
        joint = 1.0
        for i in range(0, step):
            joint = tl.minimum(joint * tl.load(weighed.ratio + first + i), 1.0)
        row_ptr = target.logits + (begin + step) * target.stride
        draft_row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
        scale, place = scale_of(temperature), first + step
        rest = _residual(weighed, place, joint, row_ptr, draft_row_ptr, target, drafts, scale, tile, TILE_SIZE)
        tl.store(rest_ptr + place * num_tiles + tile, rest)
    # A request without drafts still has a token to draw.
    num_programs = tl.where(num_rows > 0, num_tiles * tl.maximum(num_rows - 1, 1), 0)
    if is_last(scanned.arrivals + request, step * num_tiles + tile, num_programs):
        tiles = tl.arange(0, TILES)
        seed = tl.load(parameters.seeds + state)
        key = stream_key(seed, tl.load(layout.positions + begin, mask=num_rows > 0, other=0), _BLOCK)
        num_accepted, joint, ratio = 0, 1.0, 1.0
        for i in range(1, num_rows):
            joint = tl.minimum(joint * tl.load(weighed.ratio + first + i - 1), 1.0)
            is_draft = num_rows - 1 > i
            num_rests = tl.where(is_draft & (temperature > 0.0), num_tiles, 0)
            rests = tl.load(rest_ptr + (first + i) * num_tiles + tiles, mask=tiles < num_rests, other=0.0)
            rest = tl.sum(rests, axis=0)
            # Nothing left of nothing to gain is NaN, and not kept.
            keep = tl.where(is_draft, rest / (rest + 1.0 - joint), joint)
            # At temperature 0 the ratios are 0 and 1, and the first 0 decides.
            is_kept = tl.where(temperature == 0.0, joint > 0.0, uniform(key, tl.full((), 0, tl.int64) + i) < keep)
            num_accepted = tl.where(is_kept, i, num_accepted)
            ratio = tl.where(is_kept, joint, ratio)
        write_accepted(
            result, num_accepted, ratio, weighed, scanned, target, drafts, layout, parameters, request, num_groups,
            width, WIDTH, GROUPS, GROUP_SIZE,
        )  # fmt: skip


def block_rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, V]
    cu_num_logits: torch.Tensor,  # [N + 1]
    draft_token_ids: torch.Tensor,  # [num_logits]
    positions: torch.Tensor,  # [num_logits]
    idx_mapping: torch.Tensor,  # [N]
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor,  # [num_states, >= max_num_draft, <= V]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the front door; three launches."""
    num_reqs, width = len(idx_mapping), max_num_draft + 1
    layout = layout_of(cu_num_logits, draft_token_ids, positions, idx_mapping)
    target, drafts = target_of(target_logits), drafts_of(draft_logits)
    parameters, given = parameters_of(sampling, layout)
    result = new_result(num_reqs, width, target_logits.device)
    scanned = scan(target, drafts, layout, parameters, width)
    weighed = weigh(None, scanned, target, drafts, layout, parameters, given, width)
    num_groups, num_tiles = scanned.maximum.shape[-1], triton.cdiv(target.vocab_size, TILE_SIZE)
    rest = scanned.maximum.new_empty(num_reqs, width, num_tiles)
    _keep_kernel[(num_tiles, max_num_draft, num_reqs)](
        result, rest, weighed, scanned, target, drafts, layout, parameters, num_groups, WIDTH=padded_width(width),
        TILES=triton.next_power_of_2(num_tiles), GROUPS=triton.next_power_of_2(num_groups), GROUP_SIZE=GROUP_SIZE,
        TILE_SIZE=TILE_SIZE, num_warps=8,
    )  # fmt: skip
    return result.sampled, result.num_sampled
