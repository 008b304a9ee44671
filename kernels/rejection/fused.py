"""Modified rejection sampling in Triton, in two launches; see reference.py for the algorithm.

With a one-hot q and no truncation the first launch draws: a program holds the race of one tile of a row, in the row's
own noise, and leaves what won, the tile's maximum and the rate at which the winner arrived relative to it. The second
lets the tiles' winners race, all rows of a request at once, and compares the rows' with the drafts. Truncation and a
dense q need the whole row before a token can win: there the first launch is a scan (scan/), the second draws
(truncation/, dense/). No launch waits for the host, so a CUDA graph can record them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import Sampling
from .arguments import (
    Layout,
    Noise,
    Result,
    Target,
    drafts_of,
    layout_of,
    new_result,
    padded_width,
    parameters_of,
    target_of,
)
from .dense.fused import weigh
from .noise.fused import exponential, stream_key
from .noise.reference import GROUP, TOKEN
from .reference import GROUP_SIZE
from .result.fused import write_drawn
from .scan.fused import LARGEST, LOG2_E, TILE_SIZE, finite_maximum, load_logits, load_position, scan, tidy
from .truncation.fused import launch as launch_truncated

_GROUP, _TOKEN = tl.constexpr(GROUP), tl.constexpr(TOKEN)


class Winners(NamedTuple):
    """What each tile leaves [num_reqs, width, num_tiles]."""

    # float32, after temperature, in bits
    maximum: torch.Tensor
    # float32
    rate: torch.Tensor
    # int32
    token: torch.Tensor


@triton.jit
def _draw_kernel(winners, target, layout, parameters, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Lets the tokens of a tile of a row race."""
    tile, step, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(layout.cu_num_logits + request).to(tl.int64) + step
    if row >= tl.load(layout.cu_num_logits + request + 1):
        return
    state = tl.load(layout.idx_mapping + request)
    temperature = tl.load(parameters.temperature + state)
    row_ptr = target.logits + row * target.stride
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    scale = tl.where(temperature == 0.0, 1.0, LOG2_E / temperature)
    # As they are: few instructions a logit are what keeps up with the memory. A maximum leaves NaN out.
    logits = tl.load(row_ptr + offsets, mask=offsets < target.vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(tl.max(logits, axis=1), axis=0)
    maximum = tl.where(largest != largest, float("-inf"), largest) * scale
    rate = 1.0
    if temperature == 0.0:
        first = tl.min(tl.min(tl.where(logits == maximum, offsets, target.vocab_size), axis=1), axis=0)
        # Of NaN alone no logit is the maximum.
        token = tl.where(maximum == float("-inf"), tile * GROUPS * GROUP_SIZE, first)
    else:
        sums = tl.sum(tl.exp2(tl.fma(logits, scale, -finite_maximum(maximum))), axis=1)
        is_tidy = tl.sum(sums, axis=0) < float("inf")  # NaN is not
        if not is_tidy:
            logits = tl.minimum(tidy(logits) * scale, LARGEST)
            maximum = tl.max(tl.max(logits, axis=1), axis=0)
            sums = tl.sum(tl.exp2(logits - finite_maximum(maximum)), axis=1)
        seed, position = tl.load(parameters.seeds + state), load_position(layout, row)
        rates = sums / exponential(stream_key(seed, position, _GROUP), groups)
        rate, winner = tl.max(rates, axis=0, return_indices=True)
        # Its tokens are in the cache: cheaper than to pick them out of all registers.
        tokens = (tile * GROUPS + winner) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
        chosen = load_logits(row_ptr, tokens, tokens < target.vocab_size)
        base = finite_maximum(maximum)
        depths = tl.where(is_tidy, tl.fma(chosen, scale, -base), tl.minimum(chosen * scale, LARGEST) - base)
        token_rates = tl.exp2(depths) / exponential(stream_key(seed, position, _TOKEN), tokens)
        token = (tile * GROUPS + winner) * GROUP_SIZE + tl.argmax(token_rates, axis=0)
    slot = (request * tl.num_programs(1) + step) * tl.num_programs(0) + tile
    tl.store(winners.maximum + slot, maximum)
    tl.store(winners.rate + slot, rate)
    tl.store(winners.token + slot, token)


@triton.jit(do_not_specialize=["width"])
def _accept_kernel(
    result, winners, layout, parameters, width, num_tiles, WIDTH: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Lets the winners of a request's tiles race, and compares the rows' with the drafts."""
    request = tl.program_id(0)
    begin, end = tl.load(layout.cu_num_logits + request), tl.load(layout.cu_num_logits + request + 1)
    temperature = tl.load(parameters.temperature + tl.load(layout.idx_mapping + request))
    steps, tiles = tl.arange(0, WIDTH), tl.arange(0, TILES)
    slots = (request * width + steps[:, None]) * num_tiles + tiles[None, :]
    inside = (steps[:, None] < end - begin) & (tiles[None, :] < num_tiles)
    maxima = tl.load(winners.maximum + slots, mask=inside, other=float("-inf"))
    rates = tl.load(winners.rate + slots, mask=inside, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=1, keep_dims=True))
    scaled = tl.where(maxima == float("-inf"), 0.0, rates * tl.exp2(maxima - maximum))
    winner = tl.argmax(tl.where(temperature == 0.0, maxima, scaled), axis=1)
    tokens = tl.load(winners.token + (request * width + steps) * num_tiles + winner, mask=steps < end - begin, other=-1)
    write_drawn(result, layout, request, begin, end - begin, tokens, width, WIDTH)


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
    width = max_num_draft + 1
    layout = layout_of(cu_num_logits, draft_token_ids, positions, idx_mapping)
    result = new_result(len(idx_mapping), width, target_logits.device)
    if draft_logits is None or max_num_draft == 0:
        _launch(result, target_of(target_logits), layout, sampling)
    else:
        target, drafts = target_of(target_logits), drafts_of(draft_logits)
        parameters, given = parameters_of(sampling, layout)
        scanned = scan(target, drafts, layout, parameters, width)
        weigh(result, scanned, target, drafts, layout, parameters, given, width)
    return result.sampled, result.num_sampled


def sample_step(
    target_logits: torch.Tensor, layout: Layout, sampling: Sampling, max_num_draft: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the front door."""
    result = new_result(len(layout.idx_mapping), max_num_draft + 1, target_logits.device)
    num_rejected = torch.empty_like(result.num_sampled)
    result = Result(result.sampled, result.num_sampled, num_rejected)
    _launch(result, target_of(target_logits), layout_of(*layout), sampling)
    return result.sampled, result.num_sampled, num_rejected


def draw_kept(logits: torch.Tensor, layout: Layout, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """See drafts.py: token ids and the smallest logit that each row keeps, [N] each."""
    result, layout = new_result(len(logits), 1, logits.device), layout_of(*layout[:4])
    target, (parameters, given) = target_of(logits), parameters_of(sampling, layout)
    limit = launch_truncated(result, scan(target, None, layout, parameters, 1), target, layout, parameters, given)
    return result.sampled[:, 0], limit[:, 0]


def _launch(result: Result, target: Target, layout: Layout, sampling: Sampling) -> None:
    """One-hot q, in two launches."""
    if sampling.truncates:
        parameters, given = parameters_of(sampling, layout)
        scanned = scan(target, None, layout, parameters, result.sampled.shape[1])
        launch_truncated(result, scanned, target, layout, parameters, given)
    else:
        _launch_draw(result, target, layout, Noise(sampling.temperature, sampling.seeds))


def _launch_draw(result: Result, target: Target, layout: Layout, parameters: Noise) -> None:
    """The same without truncation."""
    num_reqs, width = result.sampled.shape
    num_tiles = triton.cdiv(target.vocab_size, TILE_SIZE)
    maximum = torch.empty(num_reqs, width, num_tiles, dtype=torch.float32, device=target.logits.device)
    winners = Winners(maximum, torch.empty_like(maximum), torch.empty_like(maximum, dtype=torch.int32))
    _draw_kernel[(num_tiles, width, num_reqs)](
        winners, target, layout, parameters, GROUPS=TILE_SIZE // GROUP_SIZE, GROUP_SIZE=GROUP_SIZE, num_warps=8
    )
    _accept_kernel[(num_reqs,)](
        result, winners, layout, parameters, width, num_tiles, WIDTH=padded_width(width),
        TILES=triton.next_power_of_2(num_tiles), num_warps=1,
    )  # fmt: skip
