"""Modified rejection sampling in Triton, in two launches; see reference.py for the algorithm.

The first scans: a program has a tile of a row, and leaves the maximum and the weight of each group of its tokens. With
these the second finds a row's thresholds, lets few groups race, and decides what a request emits. No launch waits for
the host, so a CUDA graph can record them.
"""

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
    """See the front door; also how many drafts were rejected, where rows say where their tokens stand; and with a
    one-hot q the smallest logit that each row keeps, [num_reqs, width]."""
    width, layout = max_num_draft + 1, layout_of(*layout)
    sampled = torch.empty(len(layout.idx_mapping), width, dtype=torch.int64, device=target_logits.device)
    num_sampled = torch.empty_like(sampled[:, 0], dtype=torch.int32)
    result = Result(sampled, num_sampled, None if layout.logits_indices is None else torch.empty_like(num_sampled))
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
    """See drafts.py: rows without drafts, in two launches."""
    layout = layout_of(*layout)
    sampled = torch.empty(len(layout.idx_mapping), 1, dtype=torch.int64, device=logits.device)
    largest_probs = torch.empty_like(sampled[:, 0], dtype=torch.float32)
    target, (parameters, given) = target_of(logits), parameters_of(sampling, layout)
    scanned, result = (
        scan(target, None, layout, parameters),
        Result(sampled, torch.empty_like(largest_probs, dtype=torch.int32)),
    )
    draw(result, scanned, target, layout, parameters, GREEDY if greedy else given, largest_probs)
    return sampled[:, 0], largest_probs
