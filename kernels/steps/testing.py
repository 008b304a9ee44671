"""Inputs for checks of a step's rows: requests in and after their prompts, rows of padding, drafts of two stages."""

from typing import Any, NamedTuple

import torch

from . import KINDS, SUMS, Chain, Rows, Staged, Totals


class Step(NamedTuple):
    """The arguments of `limit`, but for what it writes, and those of `tally`, but for what was counted before."""

    rows: Rows
    lengths: Any
    limits: Any
    most: Any
    num_draft: Any
    staged: Staged


def make_step(num_rows: int, max_num_draft: int, seed: int = 1) -> Step:
    """Of twice as many slots; the last of many rows are padding."""
    rng, num_slots = torch.Generator().manual_seed(seed), 2 * num_rows

    def numbers(high: Any, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=rng) * high).to(torch.int32)

    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    sampled = numbers(max_num_draft + 2, num_rows)
    if num_rows > 4:
        slots[-2:], sampled[-2:] = num_slots, 0
    rejected = numbers(max_num_draft + 2 - sampled, num_rows) * (sampled > 0)
    allowed = (torch.arange(num_slots) % number > 0 for number in (2, 3))  # two stages
    limits = torch.stack((numbers(max_num_draft + 1, num_slots), *numbers(50, 2, num_slots), *allowed))
    looked_up, exited = (numbers(max_num_draft + 2, num_rows) - 1 for _ in range(2))
    sent = numbers(max_num_draft + 1, num_slots + 1), numbers(2, num_slots + 1, max_num_draft)
    stage, confirmed = numbers(2, num_rows, max_num_draft), numbers(2, num_rows)
    staged = Staged(*sent, sampled, rejected, stage, looked_up, exited, confirmed)
    most = torch.tensor(max_num_draft, dtype=torch.int32)
    rows, lengths = Rows(slots, sampled, rejected), numbers(40, num_slots)
    return Step(rows, lengths, limits.T.int().contiguous(), most, numbers(max_num_draft + 1, num_rows), staged)


def make_chains(num_rows: int, max_num_draft: int, seed: int = 1) -> tuple[Chain, Chain]:
    """A lookup's, and those of a stage that takes a step fewer where it can, and agrees with most of these tokens."""
    rng, num_steps = torch.Generator().manual_seed(seed), max(1, max_num_draft - 1)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=rng) * high).to(torch.int32)

    first = numbers(99, num_rows, max_num_draft)
    second = (first + (numbers(8, num_rows, max_num_draft) == 0))[:, :num_steps].int().contiguous()
    confidence = torch.rand(num_rows, num_steps, generator=rng)
    lengths = numbers(max_num_draft + 1, num_rows), numbers(num_steps + 1, num_rows)
    for every, own in zip((4, 3), lengths, strict=True):
        own[::every] = 0
    return Chain(first, lengths[0], numbers(9, num_rows, max_num_draft).long()), Chain(second, lengths[1], confidence)


def new_totals(num_slots: int, max_num_draft: int, device: Any, once: int = 1) -> Totals:
    """Of nothing yet."""
    width, num_stages = max_num_draft + 2, 2
    size = width * (width + 2) + num_stages * (len(KINDS) * max_num_draft + len(SUMS))
    cells, by_slot = (torch.zeros(size, dtype=torch.int64, device=device) for size in ((size,), (num_slots + 1, 2)))
    return Totals(cells, by_slot, torch.full((1,), once, dtype=torch.int64, device=device))
