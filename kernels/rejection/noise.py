"""Streams of counter-based noise in PyTorch. Every random number of verification is a function of the request's seed,
the token's position, a stream (its purpose), and a counter (a token or a group of tokens). N: rows."""

import torch

# Uses of a number. The position is below 2**56, so a stream changes other bits of the state.
GROUP, TOKEN, ACCEPT, RECOVERED_GROUP, RECOVERED_TOKEN = range(1, 6)
STREAM_SHIFT = 56
_MASK = (1 << 64) - 1


def _signed(constant: int) -> int:
    constant &= _MASK
    return constant - (1 << 64) if constant >= 1 << 63 else constant


STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """64 mixed bits of each int64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

    >>> splitmix64(torch.tensor([0])) == _signed(0xE220A8397B1DCDAF)
    tensor([True])
    """
    bits = state + _signed(STEP)
    # int64 shifts are arithmetic: the mask clears the copies of the sign.
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(FIRST)
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(SECOND)
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def keys(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Returns states [N] int64 of one stream, from seeds and positions, [N] int64 each."""
    return splitmix64(splitmix64(seeds) ^ positions ^ (stream << STREAM_SHIFT))


def uniform(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Returns float32 numbers in (0, 1) of int64 states and counters that broadcast, 32 bits each."""
    bits = splitmix64(keys + counters * _signed(STEP)) >> 32 & (1 << 32) - 1
    return ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def exponential(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Exponential(1) noise, float32, precise for small values, because the smallest value decides.

    >>> exponential(keys(torch.tensor([7]), torch.tensor([3]), TOKEN)[:, None], torch.arange(5)).shape
    torch.Size([1, 5])
    """
    return -torch.log1p(-uniform(keys, counters))
