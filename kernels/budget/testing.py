"""Batches with budgets, for tests and for the check of a device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import Layout, share_budget


class Share(NamedTuple):
    accept_probs: torch.Tensor
    slots: torch.Tensor
    num_tokens: torch.Tensor
    budget: int


def make_shares(num_rows: int, width: int, num_slots: int = 16, seed: int = 1) -> Iterator[Share]:
    """Batches of which none, some and all of the drafts are verified; probabilities are multiples of a quarter, so that
    many are equal, and 0 and 1 among them."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    for accept_probs in (
        torch.randint(5, (num_slots, width), generator=rng) / 4,
        torch.rand(num_slots, width, generator=rng),
    ):
        num_draft = torch.randint(width + 1, (num_rows,), generator=rng)
        others = torch.randint(1, 4, (num_rows,), generator=rng)
        total = int(num_draft.sum())
        for budget in sorted({0, 1, total // 3, total // 2, max(0, total - 1), total} & set(range(total + 1))):
            yield Share(accept_probs, slots, torch.stack((num_draft, others)).int(), budget)


def shared(share: Share, implementation: str, device: torch.device) -> list[torch.Tensor]:
    """cu_num_logits and query_start_loc, on the host, of one token a request beside its drafts."""
    layout = Layout(*torch.full((2, len(share.accept_probs) + 1), -1, dtype=torch.int32, device=device))
    accept_probs, slots, num_tokens = (part.to(device) for part in share[:3])
    share_budget(layout, accept_probs, slots, num_tokens, share.budget, 1, implementation)
    return [bounds.cpu() for bounds in layout]
