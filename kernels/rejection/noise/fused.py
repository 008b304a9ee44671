"""The streams of noise/reference.py for Triton kernels: the same bits."""

import triton
import triton.language as tl

from .reference import STREAM_SHIFT

_STREAM_SHIFT = tl.constexpr(STREAM_SHIFT)


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


@triton.jit
def stream_key(seed, position, stream):
    """State of a stream, uint64, from int64 scalars; the stream may be a constant."""
    where = position ^ (stream << _STREAM_SHIFT)
    return splitmix64(splitmix64(seed.to(tl.uint64)) ^ where.to(tl.uint64))
