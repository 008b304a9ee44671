"""Modified rejection sampling in Triton, in two launches; see reference.py for the algorithm.

With a one-hot q and no truncation the first launch draws: a program holds the race of one tile of a row, in the row's
own noise, and leaves what won, the tile's maximum and the rate at which the winner arrived relative to it. The second
lets the tiles' winners race, all rows of a request at once, and compares the rows' with the drafts. Truncation and a
dense q need the whole row before a token can win: there the first launch is a scan (scan/), the second draws
(truncation/, dense/). No launch waits for the host, so a CUDA graph can record them.
"""

import torch
import triton
import triton.language as tl

from . import Sampling
from .dense.fused import weigh
from .noise.fused import exponential, stream_key
from .noise.reference import GROUP, TOKEN
from .reference import GROUP_SIZE
from .result.fused import write_drawn
from .scan.fused import LOG2_E, TILE_SIZE, finite_maximum, load_logits, scan, tidy
from .truncation.fused import launch as launch_truncated

_GROUP, _TOKEN = tl.constexpr(GROUP), tl.constexpr(TOKEN)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _draw_kernel(
    # [num_reqs, width, num_tiles] float32, float32, int32: what each tile leaves; maxima after temperature, in bits
    maximum_ptr,
    rate_ptr,
    token_ptr,
    # [num_logits, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_reqs + 1] int32
    cu_num_logits_ptr,
    # [num_logits] int64
    positions_ptr,
    # [num_reqs]
    idx_mapping_ptr,
    # [num_states] float32, int64
    temperature_ptr,
    seeds_ptr,
    vocab_size,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    tile, step, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(cu_num_logits_ptr + request).to(tl.int64) + step
    if row >= tl.load(cu_num_logits_ptr + request + 1):
        return
    state = tl.load(idx_mapping_ptr + request)
    temperature = tl.load(temperature_ptr + state)
    row_ptr = logits_ptr + row * logits_stride
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    scale = tl.where(temperature == 0.0, 1.0, LOG2_E / temperature)
    # As they are: few instructions a logit are what keeps up with the memory. A maximum leaves NaN out.
    logits = tl.load(row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(tl.max(logits, axis=1), axis=0)
    maximum = tl.where(largest != largest, float("-inf"), largest) * scale
    rate = 1.0
    if temperature == 0.0:
        first = tl.min(tl.min(tl.where(logits == maximum, offsets, vocab_size), axis=1), axis=0)
        # Of NaN alone no logit is the maximum.
        token = tl.where(maximum == float("-inf"), tile * GROUPS * GROUP_SIZE, first)
    else:
        sums = tl.sum(tl.exp2(tl.fma(logits, scale, -finite_maximum(maximum))), axis=1)
        is_tidy = tl.sum(sums, axis=0) < float("inf")  # NaN is not
        if not is_tidy:
            logits = tl.minimum(tidy(logits) * scale, _LARGEST)
            maximum = tl.max(tl.max(logits, axis=1), axis=0)
            sums = tl.sum(tl.exp2(logits - finite_maximum(maximum)), axis=1)
        seed, position = tl.load(seeds_ptr + state), tl.load(positions_ptr + row)
        rates = sums / exponential(stream_key(seed, position, _GROUP), groups)
        rate, winner = tl.max(rates, axis=0, return_indices=True)
        # Its tokens are in the cache: cheaper than to pick them out of all registers.
        tokens = (tile * GROUPS + winner) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
        chosen = load_logits(row_ptr, tokens, tokens < vocab_size)
        base = finite_maximum(maximum)
        depths = tl.where(is_tidy, tl.fma(chosen, scale, -base), tl.minimum(chosen * scale, _LARGEST) - base)
        token_rates = tl.exp2(depths) / exponential(stream_key(seed, position, _TOKEN), tokens)
        token = (tile * GROUPS + winner) * GROUP_SIZE + tl.argmax(token_rates, axis=0)
    slot = (request * tl.num_programs(1) + step) * tl.num_programs(0) + tile
    tl.store(maximum_ptr + slot, maximum)
    tl.store(rate_ptr + slot, rate)
    tl.store(token_ptr + slot, token)


@triton.jit
def _accept_kernel(
    # [num_reqs, width] int64, [num_reqs] int32
    sampled_ptr,
    num_sampled_ptr,
    # [num_reqs, width, num_tiles] float32, float32, int32
    maximum_ptr,
    rate_ptr,
    token_ptr,
    # [num_logits]
    draft_token_ids_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    width,
    num_tiles,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    request = tl.program_id(0)
    begin, end = tl.load(cu_num_logits_ptr + request), tl.load(cu_num_logits_ptr + request + 1)
    temperature = tl.load(temperature_ptr + tl.load(idx_mapping_ptr + request))
    steps, tiles = tl.arange(0, WIDTH), tl.arange(0, TILES)
    slots = (request * width + steps[:, None]) * num_tiles + tiles[None, :]
    inside = (steps[:, None] < end - begin) & (tiles[None, :] < num_tiles)
    maxima = tl.load(maximum_ptr + slots, mask=inside, other=float("-inf"))
    rates = tl.load(rate_ptr + slots, mask=inside, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=1, keep_dims=True))
    scaled = tl.where(maxima == float("-inf"), 0.0, rates * tl.exp2(maxima - maximum))
    winners = tl.argmax(tl.where(temperature == 0.0, maxima, scaled), axis=1)
    tokens = tl.load(token_ptr + (request * width + steps) * num_tiles + winners, mask=steps < end - begin, other=-1)
    write_drawn(sampled_ptr, num_sampled_ptr, draft_token_ids_ptr, request, begin, end - begin, tokens, width, WIDTH)


def rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    draft_token_ids: torch.Tensor,  # [num_logits]
    positions: torch.Tensor,  # [num_logits]
    idx_mapping: torch.Tensor,  # [num_reqs]
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor | None = None,  # [num_states, >= max_num_draft, <= vocab_size]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the front door."""
    num_reqs, width = len(idx_mapping), max_num_draft + 1
    sampled = positions.new_empty(num_reqs, width, dtype=torch.int64)
    num_sampled = positions.new_empty(num_reqs, dtype=torch.int32)
    result, layout = (sampled, num_sampled), (cu_num_logits, positions, idx_mapping)
    if max_num_draft == 0:
        draft_logits = None
    if draft_logits is None and not sampling.truncates:
        _launch_draw(*result, target_logits, draft_token_ids, *layout, sampling)
        return result
    scanned = scan(target_logits, draft_logits, cu_num_logits, idx_mapping, sampling.temperature, width)
    if draft_logits is None:
        launch_truncated(result, scanned, target_logits, draft_token_ids, *layout, sampling)
    else:
        weigh(result, scanned, target_logits, draft_logits, draft_token_ids, *layout, sampling, width)
    return result


def _launch_draw(
    sampled: torch.Tensor,  # [num_reqs, width] int64, to be written
    num_sampled: torch.Tensor,  # [num_reqs] int32, to be written
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    sampling: Sampling,
) -> None:
    """One-hot q without truncation, in two launches."""
    (num_reqs, width), vocab_size = sampled.shape, target_logits.shape[-1]
    num_tiles = triton.cdiv(vocab_size, TILE_SIZE)
    maximum, rate = (target_logits.new_empty(num_reqs, width, num_tiles, dtype=torch.float32) for _ in range(2))
    token = torch.empty_like(rate, dtype=torch.int32)
    _draw_kernel[(num_tiles, width, num_reqs)](
        maximum, rate, token, target_logits, target_logits.stride(0), cu_num_logits, positions, idx_mapping,
        sampling.temperature, sampling.seeds, vocab_size,
        GROUPS=TILE_SIZE // GROUP_SIZE, GROUP_SIZE=GROUP_SIZE, num_warps=8,
    )  # fmt: skip
    _accept_kernel[(num_reqs,)](
        sampled, num_sampled, maximum, rate, token, draft_token_ids, cu_num_logits, idx_mapping, sampling.temperature,
        width, num_tiles, WIDTH=triton.next_power_of_2(width), TILES=triton.next_power_of_2(num_tiles), num_warps=1,
    )  # fmt: skip
