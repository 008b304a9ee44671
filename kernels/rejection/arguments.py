"""The arguments of verification's kernels, without Triton: tuples that a launcher makes and device functions pass on.
Triton compiles another variant of a kernel for other types, for pointers and numbers that are or are not divisible by
16, and for numbers equal to 1. No batch may need a new variant. Index arrays are therefore aligned here, a placeholder
replaces a missing array, and varying numbers are separate arguments that kernels list in `do_not_specialize`, which
does not apply inside tuples."""

from typing import NamedTuple

import torch

from . import Layout, Sampling

# A kernel for fewer rows is compiled for this width.
_MIN_WIDTH = 8


class Parameters(NamedTuple):
    """The fields of `Sampling`; any array of the right type replaces a missing one."""

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
    # the same, for `sample_step`
    num_rejected: torch.Tensor | None = None


def layout_of(*arrays: torch.Tensor | None) -> Layout:
    """Returns the arrays, and copies slices that are not aligned."""
    return Layout(*(array if array is None or array.data_ptr() % 16 == 0 else array.clone() for array in arrays))


def parameters_of(sampling: Sampling, layout: Layout) -> tuple[Parameters, int]:
    """Returns the parameters, and a sum that states which limits are given: 1 for top-k, 2 for top-p, 4 for min-p."""
    limits = sampling.top_k, sampling.top_p, sampling.min_p
    stand_ins = layout.cu_num_logits, sampling.temperature, sampling.temperature
    given = sum((limit is not None) << bit for bit, limit in enumerate(limits))
    chosen = (other if limit is None else limit for limit, other in zip(limits, stand_ins, strict=True))
    return Parameters(sampling.temperature, sampling.seeds, *chosen), given


def target_of(logits: torch.Tensor) -> Target:
    return Target(logits, logits.stride(0), logits.shape[-1])


def padded_width(width: int) -> int:
    """Returns a power of two; it is the same for all steps with fewer than _MIN_WIDTH drafts."""
    return max(_MIN_WIDTH, 1 << (width - 1).bit_length())
