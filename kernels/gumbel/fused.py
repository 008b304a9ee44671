"""Gumbel-max sampling in Triton, which reads the logits once and keeps no noise: the bits of reference.py.

A program of the first launch has a tile of a row and leaves its best token; the second chooses among the tiles'. No
launch waits for the host, so a CUDA graph can record them. N: rows, V: vocabulary.
"""

import torch
import triton
import triton.language as tl

# 16 tokens a thread, or 8 where a warp has 64: 16 bytes of bfloat16, and 64-bit states that fit in the registers.
TILE_SIZE, _NUM_WARPS = 2048, 4


@triton.jit
def splitmix64(state):
    """64 mixed bits of uint64."""
    bits = state + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def uniform(key, counters):
    """Numbers float32 in (0, 1) of integer counters."""
    bits = splitmix64(key + counters.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32
    return tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def exponential(key, counters):
    """Exponential(1) noise float32 of integer counters."""
    number = uniform(key, counters)
    # log1p(-number): the second factor makes up for what the rounding of 1 - number did to the logarithm.
    rest = 1.0 - number
    return tl.where(rest == 1.0, number, -tl.log(rest) * (number / (1.0 - rest)))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "positions_ptr"])
def _best_kernel(
    # [N, num_tiles] float32, int32
    score_ptr,
    token_ptr,
    # [N, V]
    logits_ptr,
    logits_stride,
    # [N] float32, int64, int64
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    vocab_size,
    TILE_SIZE: tl.constexpr,
):
    """Best token of a tile of a row: of its logits, or with noise of its scaled ones."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = tile * TILE_SIZE + tl.arange(0, TILE_SIZE)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(logits != logits, float("-inf"), logits)
    temperature = tl.load(temperature_ptr + row)
    if temperature != 0.0:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        key = splitmix64(splitmix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))
        scores = scores / temperature - tl.log(exponential(key, tokens))
    score, best = tl.max(scores, axis=0, return_indices=True)
    slot = row * tl.num_programs(0) + tile
    tl.store(score_ptr + slot, score)
    tl.store(token_ptr + slot, tile * TILE_SIZE + best)


@triton.jit
def _choose_kernel(
    # [N] int64
    chosen_ptr,
    # [N, num_tiles] float32, int32
    score_ptr,
    token_ptr,
    num_tiles,
    TILES: tl.constexpr,
):
    """The first of the best tiles' tokens."""
    row, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    scores = tl.load(score_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    token = tl.load(token_ptr + row * num_tiles + tl.argmax(scores, axis=0))
    tl.store(chosen_ptr + row, token.to(tl.int64))


def gumbel_sample(
    logits: torch.Tensor,  # [N, V]
    temperature: torch.Tensor,  # [N] float32
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64
) -> torch.Tensor:
    """See the front door."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE_SIZE)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    score = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    token = torch.empty_like(score, dtype=torch.int32)
    _best_kernel[(num_tiles, num_rows)](
        score, token, logits, logits.stride(0), temperature, seeds, positions, vocab_size,
        TILE_SIZE=TILE_SIZE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        chosen, score, token, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1
    )  # fmt: skip
    return chosen
