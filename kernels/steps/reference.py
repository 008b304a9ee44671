"""The per-row work of a step in PyTorch, which never waits for the device."""

import torch

from . import ACCEPTED, KEPT, KINDS, SUMS, VERIFIED, Rows, Staged, Totals, Wanted


def limit(
    rows: Rows,
    lengths: torch.Tensor,  # [S]
    limits: torch.Tensor,  # [S, >= 3]
    step_limit: torch.Tensor,  # []
    mapping: torch.Tensor,  # [R]
    of_stages: tuple[int, ...],
) -> Wanted:
    mapping.copy_(rows.slots).masked_fill_(rows.slots >= len(lengths), -1)
    slots = rows.slots.clamp(max=len(lengths) - 1)
    before, limits = lengths[slots], limits[slots]
    wanted = torch.minimum(limits[:, 0], limits[:, 2] - before).minimum(step_limit).clamp_(min=0)
    wanted = wanted.mul_((before <= limits[:, 1]) & (rows.num_sampled > 0)).int()
    staged = ((wanted * limits[:, 3 + stage]).clamp(max=longest) for stage, longest in enumerate(of_stages))
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


def join(
    first: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    continues: bool,
) -> tuple[torch.Tensor, ...]:
    (first_ids, ends, confidence), (given_ids, others, given) = first, second
    width, num_steps, device = first_ids.shape[1], given_ids.shape[1], first_ids.device
    places, second_ids = torch.arange(width, device=device), torch.zeros_like(first_ids)
    second_ids[:, :num_steps] = given_ids
    sure = (places + 1).float().repeat(len(second_ids), 1)
    if given is not None:
        sure[:, :num_steps] = given
    if continues:
        start, num_draft = ends, torch.maximum(ends, others)
    else:
        start, num_draft = (ends > 0) * width, torch.where(ends > 0, ends, others)
    is_first = places < start[:, None]
    token_ids, stage = torch.where(is_first, first_ids, second_ids), (~is_first).int()
    confidence = torch.where(is_first, confidence, sure).float()
    return token_ids, num_draft, stage, confidence, torch.where(num_draft > ends, num_draft - ends, -1)


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
        index = torch.where(counts > 0, (len(KINDS) * stage + kind) * K + places, 0)
        cells.index_add_(0, index.long().flatten(), counts.flatten())
    cells = cells[2 * len(KINDS) * K :]
    for stage, tokens in enumerate((staged.looked_up, staged.num_second)):
        has_any = ((places < num_draft[:, None]) & (staged.stage == stage)).any(dim=1)
        confirmed = tokens * 0 if stage or staged.confirmed is None else staged.confirmed
        sums = torch.stack((tokens >= 0, tokens.clamp(min=0), has_any, confirmed)).long() * once
        cells[len(SUMS) * stage : len(SUMS) * (stage + 1)] += sums.sum(dim=1)
