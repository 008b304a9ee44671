"""Block verification in Triton, behind a scan and a weighing of the drafts; see reference.py for the algorithm.

A third launch reads the logits once more: a program sums up one tile of a residual max(ratio * p - q, 0), in the joint
ratio of the drafts before; the last program of a request decides.
"""

import torch
import triton
import triton.language as tl

from .. import Sampling
from ..dense.fused import weigh, write_accepted
from ..noise.fused import stream_key, uniform
from ..noise.reference import BLOCK
from ..reference import GROUP_SIZE
from ..result.fused import is_last
from ..scan.fused import TILE_SIZE, load_logits, scale_of, scan

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _keep_kernel(
    sampled_ptr,
    num_sampled_ptr,
    # [num_reqs, width, num_tiles] float32: a tile's residual
    rest_ptr,
    # Weighed
    ratio_ptr,
    maximum_ptr,
    total_ptr,
    limit_ptr,
    draft_maximum_ptr,
    draft_total_ptr,
    # Scan
    group_maximum_ptr,
    group_total_ptr,
    arrivals_ptr,
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_state_stride,
    draft_step_stride,
    draft_token_ids_ptr,
    cu_num_logits_ptr,
    positions_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    vocab_size,
    draft_vocab_size,
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
    begin = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + request + 1) - begin).to(tl.int32)
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    draft_ptr, first = draft_logits_ptr + state * draft_state_stride, request * width
    if (step < num_rows - 1) & (temperature > 0.0):
        joint = 1.0
        for i in range(0, step):
            joint = tl.minimum(joint * tl.load(ratio_ptr + first + i), 1.0)
        scale, place = scale_of(temperature), first + step
        tokens = tile * TILE_SIZE + tl.arange(0, TILE_SIZE)
        logits = load_logits(logits_ptr + (begin + step) * logits_stride, tokens, tokens < vocab_size)
        p = tl.exp2((logits - tl.load(maximum_ptr + place)) * scale) / tl.load(total_ptr + place)
        p = tl.where(logits >= tl.load(limit_ptr + place), p, 0.0)
        logits = load_logits(draft_ptr + step * draft_step_stride, tokens, tokens < draft_vocab_size)
        q = tl.exp2((logits - tl.load(draft_maximum_ptr + place)) * scale) / tl.load(draft_total_ptr + place)
        tl.store(rest_ptr + place * num_tiles + tile, tl.sum(tl.maximum(joint * p - q, 0.0), axis=0))
    # A request without drafts still has a token to draw.
    num_programs = tl.where(num_rows > 0, num_tiles * tl.maximum(num_rows - 1, 1), 0)
    if is_last(arrivals_ptr + request, step * num_tiles + tile, num_programs):
        seed, tiles = tl.load(seeds_ptr + state), tl.arange(0, TILES)
        key = stream_key(seed, tl.load(positions_ptr + begin, mask=num_rows > 0, other=0), _BLOCK)
        num_accepted, joint, ratio = 0, 1.0, 1.0
        for i in range(1, num_rows):
            joint = tl.minimum(joint * tl.load(ratio_ptr + first + i - 1), 1.0)
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
            sampled_ptr, num_sampled_ptr, num_accepted, ratio, maximum_ptr, total_ptr, limit_ptr, draft_maximum_ptr,
            draft_total_ptr, group_maximum_ptr, group_total_ptr, logits_ptr, logits_stride, draft_ptr,
            draft_step_stride, draft_token_ids_ptr, positions_ptr, begin, num_rows, temperature, seed, request, width,
            vocab_size, draft_vocab_size, num_groups, WIDTH, GROUPS, GROUP_SIZE,
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
    num_reqs, width, vocab_size = len(idx_mapping), max_num_draft + 1, target_logits.shape[-1]
    sampled = positions.new_empty(num_reqs, width, dtype=torch.int64)
    num_sampled = positions.new_empty(num_reqs, dtype=torch.int32)
    scanned = scan(target_logits, draft_logits, cu_num_logits, idx_mapping, sampling.temperature, width)
    layout = draft_token_ids, cu_num_logits, positions, idx_mapping
    weighed = weigh((None, None), scanned, target_logits, draft_logits, *layout, sampling, width)
    num_groups, num_tiles = scanned.maximum.shape[-1], triton.cdiv(vocab_size, TILE_SIZE)
    rest = target_logits.new_empty(num_reqs, width, num_tiles, dtype=torch.float32)
    _keep_kernel[(num_tiles, max_num_draft, num_reqs)](
        sampled, num_sampled, rest, *weighed, *scanned, target_logits, target_logits.stride(0), draft_logits,
        *draft_logits.stride()[:2], *layout, sampling.temperature, sampling.seeds, vocab_size, draft_logits.shape[-1],
        num_groups, WIDTH=triton.next_power_of_2(width), TILES=triton.next_power_of_2(num_tiles),
        GROUPS=triton.next_power_of_2(num_groups), GROUP_SIZE=GROUP_SIZE, TILE_SIZE=TILE_SIZE, num_warps=8,
    )  # fmt: skip
    return sampled, num_sampled
