"""Small inputs, made from a seed, of all operations except verification (rejection/inputs.py)."""

from collections.abc import Iterator
from typing import Any

import torch

from . import acceptance
from .history_match import NO_MATCH, References, Texts
from .rejection.inputs import integers
from .steps import KINDS, SUMS, Rows, Staged, Totals


def make_outcomes(num_steps: int, num_rows: int, num_stages: int, max_num_draft: int, seed: int = 1) -> list[Any]:
    """Returns slots, drafts, num_sampled and num_rejected of each step; in large batches the last two rows are
    padding."""
    rng, steps = torch.Generator().manual_seed(seed), []
    for _ in range(num_steps):
        slots = torch.randperm(2 * num_rows, generator=rng)[:num_rows]
        num_draft = integers(rng, max_num_draft + 1, num_rows)
        stage = integers(rng, num_stages, num_rows, max_num_draft)
        confidence = 0.5 + 9 * torch.rand((num_rows, 1), generator=rng) + torch.arange(max_num_draft)
        confidence[::3] = torch.rand(confidence[::3].shape, generator=rng)  # probabilities
        verified = integers(rng, num_draft + 1, num_rows)
        accepted = torch.minimum(integers(rng, 2 * verified + 1, num_rows), verified)
        sampled = torch.where(integers(rng, 8, num_rows) == 0, 0, accepted + 1)  # 0: the prompt goes on
        if num_rows > 4:
            slots[-2:], num_draft[-2:], sampled[-2:], verified[-2:] = 2 * num_rows, 0, 0, 0
        rejected = torch.where(sampled > 0, verified - accepted, 0)
        steps.append((slots, acceptance.Drafts(num_draft, stage, confidence), sampled, rejected))
    return steps


def make_budgets(num_rows: int, max_num_draft: int, num_slots: int = 16) -> Iterator[tuple[Any, Any, Any, int]]:
    """Yields arguments of `share_budget` with budgets for none, some and all drafts; first with many equal
    probabilities."""
    rng = torch.Generator().manual_seed(1)
    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    probs = torch.rand(num_slots, max_num_draft, generator=rng)
    for accept_probs in ((4 * probs).round() / 4, probs):
        num_draft = integers(rng, max_num_draft + 1, num_rows)
        num_tokens = torch.stack((num_draft, 1 + integers(rng, 3, num_rows)))
        total = int(num_draft.sum())
        for budget in sorted({0, min(1, total), total // 3, total // 2, max(0, total - 1), total}):
            yield accept_probs, slots, num_tokens, budget


def make_lookup(max_num_draft: int, num_reqs: int = 12) -> tuple[Any, ...]:
    """Returns the arguments of `history_match`: a third of the requests repeat their text, a third their reference; the
    last row asks for no draft."""
    rng, shortest, longest = torch.Generator().manual_seed(1), 1_100, 2_600
    texts, others = (integers(rng, 40, num_reqs, longest + 8) for _ in range(2))
    lengths, sizes = (shortest + integers(rng, longest + 1 - shortest, num_reqs) for _ in range(2))
    for slot, length in enumerate(lengths.tolist()):
        place = 20 + int(integers(rng, shortest - 20, 1))
        if slot % 3:
            texts[slot, length - 20 : length] = (texts, others)[slot % 2][slot, place - 20 : place].clone()
    distances = 1 + integers(rng, shortest - 1, num_reqs, 2)
    distances[::4] = NO_MATCH
    limits = torch.full((num_reqs,), max_num_draft, dtype=torch.int32)
    limits[-1] = 0
    references = References(others.flatten(), torch.arange(num_reqs) * (longest + 8), sizes)
    slots = torch.randperm(num_reqs, generator=rng)
    return Texts(texts, lengths, distances), slots, limits, max_num_draft, 2, 8, references


def make_step(num_rows: int, max_num_draft: int) -> tuple[Rows, Any, Any, Any, Any, Staged]:
    """Returns Rows, lengths, limits, the step's limit, drafted tokens and Staged of `steps.limit` and `steps.tally`; in
    large batches the last two rows are padding."""
    rng, num_slots = torch.Generator().manual_seed(1), 2 * num_rows
    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    sampled = integers(rng, max_num_draft + 2, num_rows)
    if num_rows > 4:
        slots[-2:], sampled[-2:] = num_slots, 0
    rejected = integers(rng, max_num_draft + 2 - sampled, num_rows) * (sampled > 0)
    allowed = ((torch.arange(num_slots) % number > 0).int() for number in (2, 3))  # of two stages
    limits = integers(rng, max_num_draft + 1, num_slots), *integers(rng, 50, 2, num_slots), *allowed
    sent = integers(rng, max_num_draft + 1, num_slots + 1), integers(rng, 2, num_slots + 1, max_num_draft)
    first, second = (integers(rng, max_num_draft + 2, num_rows) - 1 for _ in range(2))
    stage, agreed = integers(rng, 2, num_rows, max_num_draft), integers(rng, 2, num_rows)
    staged = Staged(*sent, sampled, rejected, stage, first, second, agreed)
    lengths, num_draft = integers(rng, 40, num_slots), integers(rng, max_num_draft + 1, num_rows)
    step_limit = torch.tensor(max_num_draft, dtype=torch.int32)
    return Rows(slots, sampled, rejected), lengths, torch.stack(limits, 1), step_limit, num_draft, staged


def make_chains(num_rows: int, max_num_draft: int, seed: int = 1) -> tuple[Any, Any]:
    """Returns drafts of a lookup, and of a stage that drafts one token fewer and often the same tokens, for
    `steps.join`."""
    rng, num_steps = torch.Generator().manual_seed(seed), max(1, max_num_draft - 1)
    first = integers(rng, 99, num_rows, max_num_draft)
    second = (first + (integers(rng, 8, num_rows, max_num_draft) == 0))[:, :num_steps].contiguous()
    counts = integers(rng, max_num_draft + 1, num_rows), integers(rng, num_steps + 1, num_rows)
    counts[0][::4] = counts[1][::3] = 0
    confidences = integers(rng, 9, num_rows, max_num_draft).long(), torch.rand(num_rows, num_steps, generator=rng)
    return (first, counts[0], confidences[0]), (second, counts[1], confidences[1])


def new_totals(num_slots: int, max_num_draft: int, device: Any, once: int = 1) -> Totals:
    width, num_stages = max_num_draft + 2, 2
    size = width * (width + 2) + num_stages * (len(KINDS) * max_num_draft + len(SUMS))
    cells, by_slot = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((size,), (num_slots + 1, 2)))
    return Totals(cells, by_slot, torch.full((1,), once, dtype=torch.int64, device=device))
