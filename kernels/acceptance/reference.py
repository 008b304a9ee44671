"""Acceptance probabilities, in PyTorch. Reads nothing on the host."""

import torch

from . import DECAY, GRADES, MOST_OF_A_STEP, NUM_GRADES, PRIOR_WEIGHT, SHARED_DECAY, Drafts, State
from .worth import Other, Worth


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


def worth(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    other: Other | None,
    copies: tuple[torch.Tensor, float] | None,  # [S, 1]
) -> Worth:
    accept_probs = state.shared_tried.new_empty(drafts.confidence.shape)
    predict(state, slots, drafts, accept_probs, False, ())
    survival, kept = accept_probs.cumprod(dim=1), drafts.num_draft
    gain = survival.sum(dim=1)
    if copies is not None:
        copies[0][slots, 0] = (gain >= copies[1]).float()
    if other is not None:
        tried, accepted = (counts[other.stage].sum() for counts in (state.shared_tried, state.shared_accepted))
        own_tried, own_accepted = (counts[slots, other.stage].sum(dim=1) for counts in (state.tried, state.accepted))
        rate = (own_accepted + PRIOR_WEIGHT * accepted / tried) / (own_tried + PRIOR_WEIGHT)
        best = num_kept(survival, rate[:, None], kept, other.depth, other.continues)
        kept = torch.where(other.asked > 0, best, kept)
    return Worth(gain, kept.int())


def num_kept(
    survival: torch.Tensor,  # [R, K], how likely all tokens up to each are accepted
    rate: torch.Tensor,  # [R, 1], of another stage's tokens
    num_draft: torch.Tensor,  # [R]
    depth: int,
    continues: bool = True,
) -> torch.Tensor:
    """[R] int32: see `Worth`.

    >>> survival, rate = torch.tensor([[0.8, 0.7, 0.1]]), torch.tensor([[0.5]])
    >>> num_kept(survival, rate, torch.tensor([3]), 3).tolist()
    [2]
    >>> num_kept(survival, rate, torch.tensor([3]), 3, continues=False).tolist()
    [3]
    """
    none, device = torch.zeros_like(rate), survival.device
    ends = torch.arange(survival.shape[1] + 1, device=device)
    more = (rate ** torch.arange(depth + 1, device=device)).cumsum(dim=1) - 1  # of so many tokens of the other stage
    others = more[:, (depth - ends).clamp(min=0)]
    alive = torch.cat((none + 1, survival * continues), dim=1)
    expected = torch.cat((none, survival.cumsum(dim=1)), dim=1) + alive * others
    expected = expected.masked_fill(ends > num_draft[:, None], -1.0)
    return (expected + 1e-6 * ends).argmax(dim=1).int()  # the draft's own, among equals


def _grades(confidence: torch.Tensor) -> torch.Tensor:
    is_match, ends = (confidence >= 1)[..., None], torch.tensor(GRADES, dtype=torch.float64, device=confidence.device)
    confidence = confidence.double()[..., None]
    return torch.where(is_match, confidence > ends, (1 - confidence) * ends**2 < 1).sum(dim=-1)
