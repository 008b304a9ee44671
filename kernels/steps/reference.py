"""The rows of a step, in PyTorch. Reads nothing on the host."""

import torch

from . import (
    ACCEPTED,
    AFTER,
    COMPARED,
    KEPT,
    KINDS,
    LARGEST_PROB,
    SUMS,
    VERIFIED,
    Chain,
    Joined,
    Rows,
    Staged,
    Totals,
    Wanted,
)


def limit(
    rows: Rows,
    lengths: torch.Tensor,  # [S]
    limits: torch.Tensor,  # [S, >= 3]
    most: torch.Tensor,  # []
    mapping: torch.Tensor,  # [R]
    of_stages: tuple[int, ...],
) -> Wanted:
    mapping.copy_(rows.slots).masked_fill_(rows.slots >= len(lengths), -1)
    slots = rows.slots.clamp(max=len(lengths) - 1)
    before, own = lengths[slots], limits[slots]
    wanted = torch.minimum(own[:, 0], own[:, 2] - before).minimum(most).clamp_(min=0)
    wanted = wanted.mul_((before <= own[:, 1]) & (rows.num_sampled > 0)).int()
    staged = ((wanted * own[:, 3 + stage]).clamp(max=longest) for stage, longest in enumerate(of_stages))
    return Wanted(slots, wanted, tuple(staged))


def newest(
    mapping: torch.Tensor,  # [R]
    num_computed: torch.Tensor,  # [S]
    last_sampled: torch.Tensor,  # [S]
    tables: tuple[torch.Tensor, ...],  # [S] each
) -> tuple[torch.Tensor, ...]:
    slots = mapping.clamp(min=0)
    lengths = (num_computed[slots].long() + 1) * (mapping >= 0)
    return last_sampled[slots].int(), lengths, *(table[slots] for table in tables)


def join(first: Chain, second: Chain, rule: int, adds: bool) -> Joined:
    width, num_steps, device = first.token_ids.shape[1], second.token_ids.shape[1], first.token_ids.device
    places, own, (ends, others) = torch.arange(width, device=device), first.token_ids * 0, (first[1], second[1])
    own[:, :num_steps] = second.token_ids
    sure = (places + 1).float().repeat(len(own), 1)
    if second.confidence is not None:
        sure[:, :num_steps] = second.confidence
    confirmed = ends * 0
    if rule == AFTER:
        start, num_draft, exited = ends, torch.maximum(ends, others), torch.where(others > ends, others - ends, -1)
    elif rule == COMPARED:
        both = torch.minimum(ends, others)[:, None]
        is_right = ((own == first.token_ids) & (places < both)).int().cumprod(dim=1)
        if adds and second.confidence is not None:
            both_wrong = (1 - sure) / first.confidence.float().clamp(min=1) ** 2
            sure = torch.where(is_right > 0, (1 - both_wrong).clamp(max=LARGEST_PROB), sure)
        confirmed = is_right.sum(dim=1, dtype=torch.int32)  # none where the second stage was not asked
        start, num_draft = (others == 0) * width, torch.where(others > 0, others, ends)
        exited = torch.where(others > 0, others, -1)
    else:
        start, num_draft = (ends > 0) * width, torch.where(ends > 0, ends, others)
        exited = torch.where(ends > 0, -1, others)
    is_first = places < start[:, None]
    token_ids, confidence = torch.where(is_first, first.token_ids, own), torch.where(is_first, first.confidence, sure)
    return Joined(token_ids, num_draft, (~is_first).int(), confidence.float(), exited, confirmed)


def tally(
    totals: Totals,
    rows: Rows,
    wanted: torch.Tensor,  # [R]
    num_draft: torch.Tensor,  # [R]
    max_num_draft: int,
    staged: Staged | None,
) -> None:
    width, once = max_num_draft + 2, totals.once[:1].expand(len(wanted))
    verified, drafts = rows.num_sampled + rows.num_rejected, num_draft + width * (wanted > 0)
    totals.cells.index_add_(0, (rows.num_sampled + width * verified).long(), once)
    totals.cells.index_add_(0, (width * width + drafts).long(), once)
    pairs = torch.stack((verified, rows.num_sampled), dim=1).sub_(1).clamp_(min=0)
    totals.by_slot.index_add_(0, rows.slots, pairs * once[:, None])
    if staged is not None:
        _tally_stages(totals.cells[width * (width + 2) :], rows.slots, num_draft, once, staged)


def _tally_stages(
    cells: torch.Tensor, slots: torch.Tensor, num_draft: torch.Tensor, once: torch.Tensor, staged: Staged
) -> None:
    accepted, before, K = staged.num_sampled - 1, staged.sent_stage[slots], staged.stage.shape[1]
    places = torch.arange(K, device=slots.device)
    # Tokens past a draft's end may be accepted where steps are not trimmed: a request's scheduler drops them again.
    verified = torch.minimum(staged.num_sent[slots], accepted + staged.num_rejected).maximum(accepted)
    for kind, stage, ends in (
        (VERIFIED, before, verified),
        (ACCEPTED, before, accepted),
        (KEPT, staged.stage, num_draft),
    ):
        counts = (places < ends[:, None]) * once[:, None]
        own = torch.where(counts > 0, (len(KINDS) * stage + kind) * K + places, 0)
        cells.index_add_(0, own.long().flatten(), counts.flatten())
    cells = cells[2 * len(KINDS) * K :]
    for stage, tokens in enumerate((staged.looked_up, staged.exited)):
        has_any = ((places < num_draft[:, None]) & (staged.stage == stage)).any(dim=1)
        kept = staged.confirmed * (stage == 0)
        own = torch.stack((tokens >= 0, tokens.clamp(min=0), has_any, kept)).long() * once
        cells[len(SUMS) * stage : len(SUMS) * (stage + 1)] += own.sum(dim=1)
