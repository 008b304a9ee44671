"""Acceptance probabilities, in PyTorch. Reads nothing on the host."""

import torch

from . import (
    CURVATURE_DECAY,
    DECAY,
    FEWEST,
    FIRST_CURVATURE,
    NUM_FEATURES,
    NUM_GRADES,
    PRIOR_WEIGHT,
    SHARED_DECAY,
    STEP,
    Drafts,
    State,
)


def learn(
    state: State,
    slots: torch.Tensor,  # [R]
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
) -> None:
    """See the front door."""
    num_accepted = (num_sampled - 1).clamp(min=0)
    num_verified = torch.minimum(state.num_sent[slots], num_accepted + num_rejected)
    stage, confidence = state.sent_stage[slots].long(), state.sent_confidence[slots]
    places = torch.arange(stage.shape[1], device=stage.device)
    is_tried = (places < num_verified[:, None]) & (places <= num_accepted[:, None])
    is_right = is_tried & (places < num_accepted[:, None])
    features = _features(state, slots, stage, confidence)
    accept_probs = _chances(state, features, stage)
    is_of = (stage[..., None] == torch.arange(len(state.weights), device=stage.device)) & is_tried[..., None]
    members = is_of.to(accept_probs.dtype).reshape(-1, len(state.weights)).T
    errors, weights = (
        (is_right.to(accept_probs.dtype) - accept_probs)[..., None],
        (accept_probs * (1 - accept_probs))[..., None],
    )
    slopes = members @ (errors * features).reshape(-1, NUM_FEATURES)
    state.curvature.mul_(CURVATURE_DECAY)
    state.curvature.add_(members @ (weights * features * features).reshape(-1, NUM_FEATURES))
    state.curvature.add_((1 - CURVATURE_DECAY) * FIRST_CURVATURE)
    state.weights.add_(STEP * slopes / state.curvature)
    _record(state, slots, stage * NUM_GRADES + _grades(confidence), is_tried, is_right)


def predict(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    accept_probs: torch.Tensor,  # [R, K]
) -> None:
    """See the front door."""
    state.num_sent[slots] = drafts.num_draft.int()
    state.sent_stage[slots] = drafts.stage.int()
    state.sent_confidence[slots] = drafts.confidence.double()
    accept_probs.copy_(_chances_of(state, slots, drafts))


def num_worth(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    than: int,
    depth: int,
) -> torch.Tensor:
    """See the front door."""
    survival = _chances_of(state, slots, drafts).cumprod(dim=1)
    prior = state.shared_accepted[than].sum() / state.shared_tried[than].sum()
    tried, accepted = (counts[slots, than].sum(dim=1) for counts in (state.tried, state.accepted))
    rate = (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)
    return num_kept(survival, rate[:, None], drafts.num_draft, depth)


def num_kept(
    survival: torch.Tensor,  # [R, K], how likely all tokens up to each are accepted
    rate: torch.Tensor,  # [R, 1], of another stage's tokens
    num_draft: torch.Tensor,  # [R]
    depth: int,
) -> torch.Tensor:
    """[R] int32: how many tokens of a draft to keep; see `num_worth` in the front door.

    >>> survival, rate = torch.tensor([[0.8, 0.7, 0.1]]), torch.tensor([[0.5]])
    >>> num_kept(survival, rate, torch.tensor([3]), 3).tolist()
    [2]
    """
    none = torch.zeros_like(rate)
    ends = torch.arange(survival.shape[1] + 1, device=survival.device)
    others = rate * (1 - rate ** (depth - ends).clamp(min=0)) / (1 - rate).clamp(min=1e-6)
    alive = torch.cat((none + 1, survival), dim=1)
    worth = torch.cat((none, survival.cumsum(dim=1)), dim=1) + alive * others
    worth = worth.masked_fill(ends > num_draft[:, None], -1.0)
    return (worth + 1e-6 * ends).argmax(dim=1).int()  # the draft's own, among equals


def _record(
    state: State,
    slots: torch.Tensor,  # [R]
    cells: torch.Tensor,  # [R, K] int64, stage and grade
    is_tried: torch.Tensor,  # [R, K] bool
    is_right: torch.Tensor,  # [R, K] bool
) -> None:
    """Adds to the records."""
    num_cells = state.shared_tried.numel()
    where = (cells[..., None] == torch.arange(num_cells, device=cells.device)).double()
    shape = len(slots), *state.shared_tried.shape
    tried, right = ((where * mask[..., None]).sum(dim=1).view(shape) for mask in (is_tried, is_right))
    is_new = (tried > 0).double()
    for counts, found in ((state.tried, tried), (state.accepted, right)):
        counts[slots] = counts[slots] * (1.0 - (1 - DECAY) * is_new) + found
    so_far = is_new.cumsum(dim=0)
    keep, weights = SHARED_DECAY ** so_far[-1], SHARED_DECAY ** (so_far[-1] - so_far)
    for counts, found in ((state.shared_tried, tried), (state.shared_accepted, right)):
        counts.mul_(keep).add_((found * weights).sum(dim=0))


def _grades(confidence: torch.Tensor) -> torch.Tensor:
    """0 to 3: a match of 2 tokens says little, one of 8 a lot."""
    return (confidence > 2) * 1 + (confidence > 4) + (confidence > 8)


def _features(state: State, slots: torch.Tensor, stage: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
    """[R, K, F], each of them some -1 to 1."""
    prior = state.shared_accepted / state.shared_tried
    rates = (state.accepted[slots] + PRIOR_WEIGHT * prior) / (state.tried[slots] + PRIOR_WEIGHT)
    record = rates.flatten(1).gather(1, stage * NUM_GRADES + _grades(confidence)).clamp(FEWEST, 1 - FEWEST)
    place = torch.arange(stage.shape[1], device=stage.device) + 0.0 * record
    sure = confidence.double().clamp(min=1).log() - 1.5
    return torch.stack((torch.ones_like(place), sure, place / 4 - 0.5, (record / (1 - record)).log()), dim=-1)


def _chances(state: State, features: torch.Tensor, stage: torch.Tensor) -> torch.Tensor:
    """[R, K]"""
    return 1 / (1 + (-(features * state.weights[stage]).sum(dim=-1)).exp())


def _chances_of(state: State, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """[R, K], 0 after a draft's end."""
    stage = drafts.stage.long()
    accept_probs = _chances(state, _features(state, slots, stage, drafts.confidence), stage)
    is_drafted = torch.arange(stage.shape[1], device=stage.device) < drafts.num_draft[:, None]
    return torch.where(is_drafted, accept_probs, 0.0)
