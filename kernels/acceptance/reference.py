"""Acceptance probabilities, in PyTorch. Reads nothing on the host."""

import torch

from . import DECAY, GRADES, MOST_OF_A_STEP, NUM_GRADES, PRIOR_WEIGHT, SHARED_DECAY, Drafts, State


def learn(
    state: State,
    slots: torch.Tensor,  # [R]
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
) -> None:
    num_accepted = (num_sampled - 1).clamp(min=0)
    num_verified = torch.minimum(state.num_sent[slots], num_accepted + num_rejected)
    stage, confidence = state.sent_stage[slots].long(), state.sent_confidence[slots]
    places = torch.arange(stage.shape[1], device=stage.device)
    is_tried = (places < num_verified[:, None]) & (places <= num_accepted[:, None])
    is_right = is_tried & (places < num_accepted[:, None])
    cells = stage * NUM_GRADES + _grades(confidence)
    is_of = cells[..., None] == torch.arange(state.shared_tried.numel(), device=cells.device)
    shape = len(slots), *state.shared_tried.shape
    tried, right = ((is_of & mask[..., None]).double().sum(dim=1).view(shape) for mask in (is_tried, is_right))
    all_tried = tried.sum(dim=0)
    share = MOST_OF_A_STEP / all_tried.clamp(min=MOST_OF_A_STEP)
    keep, shared_keep = (kept ** (count > 0).double() for kept, count in ((DECAY, tried), (SHARED_DECAY, all_tried)))
    for counts, shared, found in (
        (state.tried, state.shared_tried, tried),
        (state.accepted, state.shared_accepted, right),
    ):
        counts[slots] = counts[slots] * keep + found
        shared.mul_(shared_keep).add_(share * found.sum(dim=0))


def predict(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    accept_probs: torch.Tensor,  # [R, K]
    keeps: bool,
    tables: tuple[torch.Tensor, ...],  # [S, K]
) -> None:
    prior = state.shared_accepted / state.shared_tried
    found = (state.accepted[slots] + PRIOR_WEIGHT * prior) / (state.tried[slots] + PRIOR_WEIGHT)
    cells = drafts.stage.long() * NUM_GRADES + _grades(drafts.confidence)
    is_drafted = torch.arange(cells.shape[1], device=cells.device) < drafts.num_draft[:, None]
    accept_probs.copy_(torch.where(is_drafted, found.flatten(1).gather(1, cells.clamp(max=prior.numel() - 1)), 0.0))
    for table in tables:
        table[slots] = accept_probs.to(table.dtype)
    if keeps:
        state.num_sent[slots] = drafts.num_draft.int()
        state.sent_stage[slots] = drafts.stage.int()
        state.sent_confidence[slots] = drafts.confidence.double()


def _grades(confidence: torch.Tensor) -> torch.Tensor:
    return (confidence[..., None] > torch.tensor(GRADES, device=confidence.device)).sum(dim=-1)
