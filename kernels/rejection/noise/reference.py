"""Streams of counter-based noise, in PyTorch.

Every random number of verification is a function of (seed, position, stream, counter): of the request's seed, the
position that the token will stand at, what the number is for, and an index (a token or a group of tokens). Stream 0 is
the noise of kernels/gumbel, which draws drafts; none of the streams here shares a number with it. N: rows, M: counters.
"""

import torch

from ...gumbel.reference import _STEP, _signed, splitmix64

# What a number is for. The position is below 2**56, so that a stream changes other bits of the state.
GROUP, TOKEN, ACCEPT, RECOVERED_GROUP, RECOVERED_TOKEN, BLOCK = range(1, 7)
STREAM_SHIFT = 56


def keys(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """States [N] int64 of one stream, from seeds and positions, [N] int64 each."""
    return splitmix64(splitmix64(seeds) ^ positions ^ (stream << STREAM_SHIFT))


def uniform(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Numbers float32 in (0, 1) of int64 states and counters that broadcast, 32 bits each."""
    bits = splitmix64(keys + counters * _signed(_STEP)) >> 32 & (1 << 32) - 1
    return ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def exponential(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Exponential(1) noise float32; fine where it is small, because the smallest decides.

    >>> exponential(keys(torch.tensor([7]), torch.tensor([3]), TOKEN)[:, None], torch.arange(5)).shape
    torch.Size([1, 5])
    """
    return -torch.log1p(-uniform(keys, counters))
