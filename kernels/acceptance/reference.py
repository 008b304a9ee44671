"""The acceptance model in PyTorch, which never waits for the device."""

from typing import Any

import torch

from . import (
    BIN_ENDS,
    DECAY,
    FIRST_PRIORS,
    MAX_STEP_TOKENS,
    NUM_BINS,
    PRIOR_WEIGHT,
    SHARED_DECAY,
    Drafts,
    Other,
    State,
    Worth,
)


def new_state(
    num_stages: int, num_slots: int, max_num_draft: int, device: Any, prior_weight: float = PRIOR_WEIGHT
) -> State:
    tried, accepted = torch.zeros(2, num_slots, num_stages, NUM_BINS, dtype=torch.float64, device=device)
    shared_tried = torch.full((num_stages, NUM_BINS), prior_weight, dtype=torch.float64, device=device)
    priors = torch.tensor(FIRST_PRIORS, dtype=torch.float64).to(device)
    sent = torch.zeros(num_slots, max_num_draft, dtype=torch.float64, device=device)
    num_sent = torch.zeros(num_slots, dtype=torch.int32, device=device)
    return State(tried, accepted, shared_tried, shared_tried * priors, num_sent, sent.int(), sent)


def clear(state: State, slots: torch.Tensor) -> None:
    """Forgets the requests of these slots, [any] int64."""
    for array in (state.tried, state.accepted, state.num_sent):
        array.index_fill_(0, slots, 0)


def observe(
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
    is_accepted = is_tried & (places < num_accepted[:, None])
    cells = stage * NUM_BINS + _bins(confidence)
    is_cell = cells[..., None] == torch.arange(state.shared_tried.numel(), device=cells.device)
    shape = len(slots), *state.shared_tried.shape
    tried, accepted = ((is_cell & mask[..., None]).double().sum(dim=1).view(shape) for mask in (is_tried, is_accepted))
    all_tried = tried.sum(dim=0)
    share = MAX_STEP_TOKENS / all_tried.clamp(min=MAX_STEP_TOKENS)
    decay, shared_decay = DECAY ** (tried > 0).double(), SHARED_DECAY ** (all_tried > 0).double()
    for counts, shared, new in (
        (state.tried, state.shared_tried, tried),
        (state.accepted, state.shared_accepted, accepted),
    ):
        counts[slots] = counts[slots] * decay + new
        shared.mul_(shared_decay).add_(share * new.sum(dim=0))


def predict(
    state: State,
    slots: torch.Tensor,  # [R]
    drafts: Drafts,
    accept_probs: torch.Tensor,  # [R, K]
    keeps: bool,
    tables: tuple[torch.Tensor, ...],  # [S, K]
) -> None:
    prior = state.shared_accepted / state.shared_tried
    by_cell = (state.accepted[slots] + PRIOR_WEIGHT * prior) / (state.tried[slots] + PRIOR_WEIGHT)
    cells = drafts.stage.long() * NUM_BINS + _bins(drafts.confidence)
    is_drafted = torch.arange(cells.shape[1], device=cells.device) < drafts.num_draft[:, None]
    accept_probs.copy_(torch.where(is_drafted, by_cell.flatten(1).gather(1, cells.clamp(max=prior.numel() - 1)), 0.0))
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
    reports: torch.Tensor | None,  # [S, 2], written
) -> Worth:
    accept_probs = state.shared_tried.new_empty(drafts.confidence.shape)
    predict(state, slots, drafts, accept_probs, False, ())
    survival, num_kept = accept_probs.cumprod(dim=1), drafts.num_draft
    gain = survival.sum(dim=1)
    if reports is not None:
        reports[slots, 0] = gain.float()
    if other is not None:  # its bins are not known before it has drafted
        shared_tried, shared_accepted = (
            each[other.stage].sum() for each in (state.shared_tried, state.shared_accepted)
        )
        tried, accepted = (each[slots, other.stage].sum(dim=1) for each in (state.tried, state.accepted))
        rate = (accepted + PRIOR_WEIGHT * shared_accepted / shared_tried) / (tried + PRIOR_WEIGHT)
        if reports is not None:
            reports[slots, 1] = rate.float()
        best = best_length(survival, rate[:, None], num_kept, other.depth, other.continues)
        num_kept = torch.where(other.asked > 0, best, num_kept)
    return Worth(gain, num_kept.int())


def best_length(
    survival: torch.Tensor,  # [R, K], the probability that all tokens up to each place are accepted
    rate: torch.Tensor,  # [R, 1], of another stage's tokens
    num_draft: torch.Tensor,  # [R]
    depth: int,
    continues: bool = True,
) -> torch.Tensor:
    """[R] int32, `num_kept` of Worth.

    >>> survival, rate = torch.tensor([[0.8, 0.7, 0.1]]), torch.tensor([[0.5]])
    >>> best_length(survival, rate, torch.tensor([3]), 3).tolist()
    [2]
    >>> best_length(survival, rate, torch.tensor([3]), 3, continues=False).tolist()
    [3]
    """
    none, device = torch.zeros_like(rate), survival.device
    ends = torch.arange(survival.shape[1] + 1, device=device)
    gains = (rate ** torch.arange(depth + 1, device=device)).cumsum(dim=1) - 1  # by the other stage's tokens
    others = gains[:, (depth - ends).clamp(min=0)]
    alive = torch.cat((none + 1, survival * continues), dim=1)
    expected = torch.cat((none, survival.cumsum(dim=1)), dim=1) + alive * others
    expected = expected.masked_fill(ends > num_draft[:, None], -1.0)
    return (expected + 1e-6 * ends).argmax(dim=1).int()  # among equals the draft's tokens


def _bins(confidence: torch.Tensor) -> torch.Tensor:
    is_match, ends = (confidence >= 1)[..., None], torch.tensor(BIN_ENDS, dtype=torch.float64, device=confidence.device)
    confidence = confidence.double()[..., None]
    return torch.where(is_match, confidence > ends, (1 - confidence) * ends**2 < 1).sum(dim=-1)
