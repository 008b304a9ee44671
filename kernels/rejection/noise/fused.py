"""The streams of noise/reference.py for Triton kernels: the same bits; their numbers are made by kernels/gumbel."""

import triton
import triton.language as tl

from ...gumbel.fused import splitmix64
from .reference import STREAM_SHIFT

_STREAM_SHIFT = tl.constexpr(STREAM_SHIFT)


@triton.jit
def stream_key(seed, position, stream):
    """State of a stream, uint64, from int64 scalars; the stream may be a constant."""
    where = position ^ (stream << _STREAM_SHIFT)
    return splitmix64(splitmix64(seed.to(tl.uint64)) ^ where.to(tl.uint64))
