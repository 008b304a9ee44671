"""The rows of a step, in PyTorch. Reads nothing on the host."""

import torch

from . import ACCEPTED, KEPT, KINDS, SUMS, VERIFIED, Rows, Staged, Totals


def limit(
    rows: Rows,
    lengths: torch.Tensor,  # [S]
    limits: torch.Tensor,  # [S, >= 3]
    most: torch.Tensor,  # []
    mapping: torch.Tensor,  # [R]
) -> tuple[torch.Tensor, torch.Tensor]:
    mapping.copy_(rows.slots).masked_fill_(rows.slots >= len(lengths), -1)
    slots = rows.slots.clamp(max=len(lengths) - 1)
    before, own = lengths[slots], limits[slots]
    wanted = torch.minimum(own[:, 0], own[:, 2] - before).minimum(most).clamp_(min=0)
    return slots, wanted.mul_((before <= own[:, 1]) & (rows.num_sampled > 0)).int()


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
