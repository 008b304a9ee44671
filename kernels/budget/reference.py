"""The shared budget in PyTorch, on any device; it never waits for the device."""

import torch

from . import Layout


def share_budget(
    layout: Layout,
    accept_probs: torch.Tensor,  # [S, K]
    slots: torch.Tensor,  # [R]
    num_tokens: torch.Tensor,  # [2, R]
    budget: int,
    num_bonus: int,
) -> None:
    (num_draft, others), num_rows, width = num_tokens, len(slots), accept_probs.shape[1]
    survival, worth = torch.ones(num_rows, device=accept_probs.device), []
    for step in range(width):  # in float32, one after the other, as the kernel does
        survival = survival * accept_probs[slots.long(), step]
        worth.append(torch.where(step < num_draft, survival, -1.0))
    best = torch.stack(worth, dim=1).flatten().sort(descending=True, stable=True).indices[:budget]
    admitted = torch.zeros(num_rows * width, dtype=torch.int32, device=accept_probs.device)
    admitted[best] = 1
    num_admitted = admitted.view(num_rows, width).sum(dim=1)
    for bounds, more in ((layout.cu_num_logits, num_bonus), (layout.query_start_loc, others)):
        ends = (num_admitted + more).cumsum(dim=0)
        bounds[0] = 0
        bounds[1 : num_rows + 1] = ends
        bounds[num_rows + 1 :] = ends[-1]
