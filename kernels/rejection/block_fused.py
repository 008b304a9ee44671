"""Block verification in Triton, after a scan and a weighing of the drafts; see reference.py for the algorithm.

A third launch reads the logits once more: a program sums up one tile of a residual max(ratio * p - q, 0), in the joint
ratio of the drafts before; the last program of a request decides.
"""

import triton
import triton.language as tl

from . import Layout
from .accept_fused import Weighed, is_last, load_weighed, write_accepted
from .arguments import Drafts, Parameters, Result, Target, padded_width
from .noise import BLOCK
from .race_fused import stream_key, uniform, weights_of
from .scan_fused import TILE_SIZE, Scan, load_request, scale_of

_BLOCK, _TILE_SIZE = tl.constexpr(BLOCK), tl.constexpr(TILE_SIZE)


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
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
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
        p, q = load_weighed(weighed, target, drafts, begin, num_rows, state, step, first)
        tokens = tile * _TILE_SIZE + tl.arange(0, _TILE_SIZE)
        p_weights, q_weights = weights_of(p, q, scale_of(temperature), tokens)
        rest = tl.sum(tl.maximum(joint * p_weights - q_weights, 0.0), axis=0)
        tl.store(rest_ptr + (first + step) * num_tiles + tile, rest)
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
            result, num_accepted, ratio, weighed, scanned, target, drafts, layout, parameters, request, width, WIDTH,
            GROUPS,
        )  # fmt: skip


def keep(
    result: Result, weighed: Weighed, scanned: Scan, target: Target, drafts: Drafts, layout: Layout, own: Parameters
) -> None:
    """One launch for the batch."""
    num_reqs, width = result.sampled.shape
    num_tiles = triton.cdiv(target.vocab_size, TILE_SIZE)
    rest = scanned.maximum.new_empty(num_reqs, width, num_tiles)
    _keep_kernel[(num_tiles, width - 1, num_reqs)](
        result, rest, weighed, scanned, target, drafts, layout, own, WIDTH=padded_width(width),
        TILES=triton.next_power_of_2(num_tiles), GROUPS=triton.next_power_of_2(scanned.num_groups), num_warps=8,
    )  # fmt: skip
