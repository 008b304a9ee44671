"""Rounds in Triton: a program tries the siblings of a node. After each rejection it replaces p by r, and removes the
sibling from q, without normalising; it keeps both sums."""

import torch
import triton
import triton.language as tl

from ..rejection import noise
from ..rejection.race_fused import exponential, stream_key, uniform

_ACCEPT, _RECOVERED_TOKEN = tl.constexpr(noise.ACCEPT), tl.constexpr(noise.RECOVERED_TOKEN)
_TILE = tl.constexpr(2048)
_REST = tl.constexpr(2.0**-80)  # share of r in the residual: see `residual` of rejection/reference.py


@triton.jit
def _reject(p_row, q_row, vocab_size, sibling, p_sum, q_sum, key):
    """Returns the sums of r and q after a sibling is rejected, and a token that is drawn from this r."""
    r_sum, q_rest, earliest, token = 0.0, 0.0, -1.0, 0
    tl.debug_barrier()  # all threads have read the sibling's r and q
    for tile in range(0, vocab_size, _TILE):
        tokens = tile + tl.arange(0, _TILE)
        is_token = tokens < vocab_size
        r = tl.load(p_row + tokens, mask=is_token, other=0.0) / p_sum
        q = tl.load(q_row + tokens, mask=is_token, other=0.0)
        rest = tl.maximum(r - q / q_sum, 0.0) + r * _REST
        tl.store(p_row + tokens, rest, mask=is_token)
        largest, place = tl.max(rest / exponential(key, tokens), axis=0, return_indices=True)
        token, earliest = tl.where(largest > earliest, tile + place, token), tl.maximum(largest, earliest)
        r_sum += tl.sum(rest, axis=0)
        q_rest += tl.sum(tl.where(tokens == sibling, 0.0, q), axis=0)
    tl.store(q_row + sibling, 0.0, mask=sibling >= 0)
    tl.debug_barrier()
    return tl.where(r_sum > 0, r_sum, 1.0), tl.where(q_rest > 0, q_rest, 1.0), token


@triton.jit(do_not_specialize=["vocab_size", "num_siblings"])
def _try_kernel(out_ptr, p_ptr, q_ptr, siblings_ptr, seeds_ptr, positions_ptr, vocab_size, num_siblings):
    node = tl.program_id(0).to(tl.int64)
    p_row, q_row = p_ptr + node * vocab_size, q_ptr + node * vocab_size
    seed, position = tl.load(seeds_ptr + node), tl.load(positions_ptr + node)
    key = stream_key(seed, position, tl.full((), _ACCEPT, tl.int64))
    draw_key = stream_key(seed, position, tl.full((), _RECOVERED_TOKEN, tl.int64))
    # No sibling is rejected yet: q is divided by infinity.
    p_sum, _, token = _reject(p_row, q_row, vocab_size, -1, 1.0, float("inf"), draw_key)
    q_sum, goes_on = 1.0, num_siblings > 0
    for turn in range(num_siblings):
        sibling = tl.load(siblings_ptr + node * num_siblings + turn)
        is_token = (sibling >= 0) & (sibling < vocab_size)
        r, q = tl.load(p_row + sibling, mask=is_token, other=0.0), tl.load(q_row + sibling, mask=is_token, other=0.0)
        if goes_on & (q > 0):
            goes_on = uniform(key, tl.full((), 0, tl.int32) + turn) >= (r / p_sum) / (q / q_sum)
            token = sibling.to(tl.int32)
            if goes_on:
                p_sum, q_sum, token = _reject(p_row, q_row, vocab_size, sibling, p_sum, q_sum, draw_key)
    tl.store(out_ptr + node, token.to(tl.int64))


def try_siblings(
    p: torch.Tensor, q: torch.Tensor, siblings: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    """Overwrites p and q."""
    (num_nodes, num_siblings), out = siblings.shape, torch.empty_like(positions)
    siblings = siblings.int().contiguous()
    _try_kernel[(num_nodes,)](out, p, q, siblings, seeds, positions, p.shape[1], num_siblings, num_warps=16)
    return out
