"""What the kernels of verification take: tuples that a launcher makes once and device functions hand on.

Triton compiles a kernel anew for other types, for pointers and numbers that 16 divides or not, and for numbers that
are 1. That must not happen from batch to batch: index arrays are always aligned here, an array that is not given has a
stand-in, and numbers that differ are arguments of their own, which kernels name in `do_not_specialize` (it does not
reach into tuples). Knows no Triton.
"""

from typing import NamedTuple

import torch

from . import Layout, Sampling

# A width of fewer rows is compiled as this one.
_SMALLEST_WIDTH = 8


class Parameters(NamedTuple):
    """As of `Sampling`; some array of the type stands for one that is not given."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Target(NamedTuple):
    # [num_logits, vocab_size]
    logits: torch.Tensor
    stride: int
    vocab_size: int


class Drafts(NamedTuple):
    # [num_states, >= width - 1, vocab_size]
    logits: torch.Tensor
    state_stride: int
    step_stride: int
    vocab_size: int


class Result(NamedTuple):
    # [num_reqs, width] int64
    sampled: torch.Tensor
    # [num_reqs] int32
    num_sampled: torch.Tensor
    # same; of a step
    num_rejected: torch.Tensor | None = None


def layout_of(*arrays: torch.Tensor | None) -> Layout:
    """With a small copy of what vLLM sliced because the batch was large."""
    return Layout(*(array if array is None or array.data_ptr() % 16 == 0 else array.clone() for array in arrays))


def parameters_of(sampling: Sampling, layout: Layout) -> tuple[Parameters, int]:
    """Also which of the three limits are given: 1 for top-k, 2 for top-p, 4 for min-p."""
    limits = sampling.top_k, sampling.top_p, sampling.min_p
    places = layout.cu_num_logits, sampling.temperature, sampling.temperature
    given = sum((limit is not None) << bit for bit, limit in enumerate(limits))
    chosen = (place if limit is None else limit for limit, place in zip(limits, places, strict=True))
    return Parameters(sampling.temperature, sampling.seeds, *chosen), given


def target_of(logits: torch.Tensor) -> Target:
    return Target(logits, logits.stride(0), logits.shape[-1])


def padded_width(width: int) -> int:
    """A power of two; the same for steps with and without drafts, unless these are many."""
    return max(_SMALLEST_WIDTH, 1 << (width - 1).bit_length())
