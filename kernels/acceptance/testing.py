"""Inputs for checks of acceptance: steps of drafts of which parts are verified, and what became of them."""

from typing import Any, NamedTuple

import torch

from . import Drafts


class Step(NamedTuple):
    """Drafts of some slots; then the arguments of `observe`."""

    slots: Any
    drafts: Drafts
    num_sampled: Any
    num_rejected: Any


def make_steps(num_steps: int, num_rows: int, num_stages: int, max_num_draft: int, seed: int = 1) -> list[Step]:
    """Of two slots for each row, and of one after them that is nobody's, which the last two rows of many have."""
    rng = torch.Generator().manual_seed(seed)

    def numbers(high: Any, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=rng) * high).to(torch.int32)

    steps = []
    for _ in range(num_steps):
        slots = torch.randperm(2 * num_rows, generator=rng)[:num_rows]
        num_draft = numbers(max_num_draft + 1, num_rows)
        stage = numbers(num_stages, num_rows, max_num_draft)
        confidence = 0.5 + 9 * torch.rand((num_rows, 1), generator=rng) + torch.arange(max_num_draft)
        verified = numbers(num_draft + 1, num_rows)
        accepted = torch.minimum(numbers(2 * verified + 1, num_rows), verified)
        sampled = torch.where(numbers(8, num_rows) == 0, verified * 0, accepted + 1)  # some are in their prompt
        if num_rows > 4:
            slots[-2:], num_draft[-2:], sampled[-2:], verified[-2:] = 2 * num_rows, 0, 0, 0
        rejected = torch.where(sampled > 0, verified - accepted, 0)
        steps.append(Step(slots, Drafts(num_draft, stage, confidence), sampled, rejected))
    return steps
