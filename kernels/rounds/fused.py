"""Rounds in Triton: a program tries the siblings of a node. After each rejection it reads the row again, to sum the
remainders of p and q."""

import torch
import triton
import triton.language as tl

from ..rejection import noise
from ..rejection.race_fused import exponential, stream_key, uniform

_ACCEPT, _RECOVERED_TOKEN = tl.constexpr(noise.ACCEPT), tl.constexpr(noise.RECOVERED_TOKEN)
_TILE = tl.constexpr(2048)
_REST = tl.constexpr(2.0**-80)  # share of r in the residual: see `residual` of rejection/reference.py


@triton.jit
def _at(values, lane, LANES: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, LANES) == lane, values, 0), axis=0)


@triton.jit
def _left(rows, tokens, tried, turn, LANES: tl.constexpr):
    """Returns r at a turn, and q without the siblings before it, which is not normalised."""
    p_row, q_row, vocab_size = rows
    siblings, q_sums, r_sums = tried
    is_token = (tokens >= 0) & (tokens < vocab_size)
    r, q = tl.load(p_row + tokens, mask=is_token, other=0.0), tl.load(q_row + tokens, mask=is_token, other=0.0)
    for before in range(turn):
        rest = tl.maximum(r - q / _at(q_sums, before, LANES), 0.0) + r * _REST
        r = rest / _at(r_sums, before, LANES)
        q = tl.where(tokens == _at(siblings, before, LANES), 0.0, q)
    return r, q


@triton.jit
def _after(rows, sibling, q_sum, key, tried, turn, LANES: tl.constexpr):
    """Returns the sums of r and q after a sibling is rejected, and a token that is drawn from this r."""
    r_sum, q_rest, earliest, token = 0.0, 0.0, -1.0, 0
    for tile in range(0, rows[2], _TILE):
        tokens = tile + tl.arange(0, _TILE)
        r, q = _left(rows, tokens, tried, turn, LANES)
        rest = tl.maximum(r - q / q_sum, 0.0) + r * _REST
        largest, place = tl.max(rest / exponential(key, tokens), axis=0, return_indices=True)
        token, earliest = tl.where(largest > earliest, tile + place, token), tl.maximum(largest, earliest)
        r_sum += tl.sum(rest, axis=0)
        q_rest += tl.sum(tl.where(tokens == sibling, 0.0, q), axis=0)
    return tl.where(r_sum > 0, r_sum, 1.0), tl.where(q_rest > 0, q_rest, 1.0), token


@triton.jit(do_not_specialize=["vocab_size", "num_siblings"])
def _try_kernel(
    out_ptr, p_ptr, q_ptr, siblings_ptr, seeds_ptr, positions_ptr, vocab_size, num_siblings, LANES: tl.constexpr
):
    node, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    siblings = tl.load(siblings_ptr + node * num_siblings + lanes, mask=lanes < num_siblings, other=-1)
    seed, position = tl.load(seeds_ptr + node), tl.load(positions_ptr + node)
    rows = p_ptr + node * vocab_size, q_ptr + node * vocab_size, vocab_size
    key = stream_key(seed, position, tl.full((), _ACCEPT, tl.int64))
    draw_key = stream_key(seed, position, tl.full((), _RECOVERED_TOKEN, tl.int64))
    # A turn without a sibling changes nothing: its q is divided by infinity.
    r_sums = tl.full((LANES,), 1.0, tl.float32)
    q_sums, q_sum, goes_on = r_sums * float("inf"), 1.0, num_siblings > 0
    _, _, token = _after(rows, -1, float("inf"), draw_key, (siblings, q_sums, r_sums), 0, LANES)
    for turn in range(num_siblings):
        sibling, tried = _at(siblings, turn, LANES), (siblings, q_sums, r_sums)
        r, q = _left(rows, sibling, tried, turn, LANES)
        if goes_on & (q > 0):
            goes_on = uniform(key, tl.full((), 0, tl.int32) + turn) >= r / (q / q_sum)
            token = sibling
            if goes_on:
                q_sums = tl.where(lanes == turn, q_sum, q_sums)
                r_sum, q_sum, token = _after(rows, sibling, q_sum, draw_key, tried, turn, LANES)
                r_sums = tl.where(lanes == turn, r_sum, r_sums)
    tl.store(out_ptr + node, token.to(tl.int64))


def try_siblings(
    p: torch.Tensor, q: torch.Tensor, siblings: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    (num_nodes, num_siblings), out = siblings.shape, torch.empty_like(positions)
    # Trees of up to 64 nodes have 7 siblings at most: one variant, which the self-check compiles before requests come.
    siblings, lanes = siblings.int().contiguous(), max(8, triton.next_power_of_2(num_siblings))
    _try_kernel[(num_nodes,)](out, p, q, siblings, seeds, positions, p.shape[1], num_siblings, LANES=lanes, num_warps=8)
    return out
