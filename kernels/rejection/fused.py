"""Modified rejection sampling in Triton, in two launches; reference.py explains the algorithm. In the first, each
program reads a tile of a row, and stores the maximum and the weight of each group of tokens. From these the second
launch computes a row's thresholds, opens a few groups for the race, and decides which tokens a request emits. No launch
waits for the host, so a CUDA graph can record them."""

import torch

from . import Layout, Sampling
from .accept_fused import GREEDY, draw, weigh
from .arguments import Drafts, Result, layout_of, parameters_of, target_of
from .scan_fused import scan


def rejection_sample(
    target_logits: torch.Tensor,
    layout: Layout,
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Also returns num_rejected if the layout has logits_indices and, with a one-hot q, each row's smallest logit that
    no limit cuts, [num_reqs, width]."""
    layout = layout_of(*layout)
    result = _new_result(layout, max_num_draft + 1)
    target, (parameters, given) = target_of(target_logits), parameters_of(sampling, layout)
    if draft_logits is None or max_num_draft == 0:
        scanned = scan(target, None, layout, parameters)
        return *result, draw(result, scanned, target, layout, parameters, given)
    drafts = Drafts(draft_logits, draft_logits.stride(0), draft_logits.stride(1), draft_logits.shape[-1])
    scanned = scan(target, drafts, layout, parameters)
    weigh(result, scanned, target, drafts, layout, parameters, given)
    return *result, None


def rated_sample(
    logits: torch.Tensor, layout: Layout, sampling: Sampling, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = layout_of(*layout)
    result = _new_result(layout, 1)
    largest_probs = torch.empty_like(result.num_sampled, dtype=torch.float32)
    target, (parameters, given) = target_of(logits), parameters_of(sampling, layout)
    scanned = scan(target, None, layout, parameters)
    draw(result, scanned, target, layout, parameters, GREEDY if greedy else given, largest_probs)
    return result.sampled[:, 0], largest_probs


def _new_result(layout: Layout, width: int) -> Result:
    num_sampled = torch.empty_like(layout.idx_mapping, dtype=torch.int32)
    sampled = num_sampled.new_empty(len(num_sampled), width, dtype=torch.int64)
    return Result(sampled, num_sampled, None if layout.logits_indices is None else torch.empty_like(num_sampled))
