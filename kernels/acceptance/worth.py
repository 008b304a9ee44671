"""How much of a draft to keep where another stage could go on. Nothing here waits."""

import torch

from . import PRIOR_WEIGHT, Drafts, State, predict


def num_worth(
    state: State,
    slots: torch.Tensor,  # [R] int64
    drafts: Drafts,
    than: int,
    depth: int,
    implementation: str | None = None,
    continues: bool = True,
) -> torch.Tensor:
    """[R] int32: how many tokens of each draft to keep, for most to be accepted.

    Args:
        than: the other stage.
        depth: its tokens end there, counted from the draft's beginning.
        implementation: see `learn`.
        continues: whether it goes on after any of them; or else all are kept, or none.
    """
    survival = survivals(state, slots, drafts, implementation)
    tried, accepted = (counts[than].sum() for counts in (state.shared_tried, state.shared_accepted))
    own_tried, own_accepted = (counts[slots, than].sum(dim=1) for counts in (state.tried, state.accepted))
    rate = (own_accepted + PRIOR_WEIGHT * accepted / tried) / (own_tried + PRIOR_WEIGHT)
    return num_kept(survival, rate[:, None], drafts.num_draft, depth, continues)


def survivals(state: State, slots: torch.Tensor, drafts: Drafts, implementation: str | None = None) -> torch.Tensor:
    """[R, K] float64: how likely all tokens of each draft up to each place are accepted; see `num_worth`."""
    accept_probs = state.shared_tried.new_empty(drafts.confidence.shape)
    predict(state, slots, drafts, accept_probs, implementation, keeps=False)
    return accept_probs.cumprod(dim=1)


def num_kept(
    survival: torch.Tensor,  # [R, K], how likely all tokens up to each are accepted
    rate: torch.Tensor,  # [R, 1], of another stage's tokens
    num_draft: torch.Tensor,  # [R]
    depth: int,
    continues: bool = True,
) -> torch.Tensor:
    """[R] int32: see `num_worth`.

    >>> survival, rate = torch.tensor([[0.8, 0.7, 0.1]]), torch.tensor([[0.5]])
    >>> num_kept(survival, rate, torch.tensor([3]), 3).tolist()
    [2]
    >>> num_kept(survival, rate, torch.tensor([3]), 3, continues=False).tolist()
    [3]
    """
    none = torch.zeros_like(rate)
    ends = torch.arange(survival.shape[1] + 1, device=survival.device)
    others = rate * (1 - rate ** (depth - ends).clamp(min=0)) / (1 - rate).clamp(min=1e-6)
    alive = torch.cat((none + 1, survival * continues), dim=1)
    worth = torch.cat((none, survival.cumsum(dim=1)), dim=1) + alive * others
    worth = worth.masked_fill(ends > num_draft[:, None], -1.0)
    return (worth + 1e-6 * ends).argmax(dim=1).int()  # the draft's own, among equals
