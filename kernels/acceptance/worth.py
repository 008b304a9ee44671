"""How many tokens of a draft are expected to be accepted, and how much of it to keep where another stage could go on.
Nothing here waits, so a CUDA graph can record it. R: rows of the batch, S: slots of requests, K: most tokens."""

from typing import Any, NamedTuple

from ..implementations import module_of
from . import Drafts, State, predict


class Other(NamedTuple):
    """Another stage, which drafts after a draft's tokens, or in its place.

    Args:
        stage: its index.
        depth: its tokens end there, counted from the draft's beginning.
        continues: whether it goes on after any of them; or else all are kept, or none.
        asked: [R] int32, how many tokens it may draft; 0: it drafts none for that row, whose draft is kept as it is.
    """

    stage: int
    depth: int
    continues: bool
    asked: Any


class Worth(NamedTuple):
    """Of each draft, [R] float64 and int32: how many tokens are expected to be accepted, and how many to keep, for most
    to be accepted."""

    gain: Any
    num_kept: Any


def worth(
    state: State,
    slots: Any,  # [R] int64
    drafts: Drafts,
    other: Other | None = None,
    copies: tuple[Any, float] | None = None,
    implementation: str | None = None,
) -> Worth:
    """What drafts are worth, in one launch.

    Args:
        other: None: all tokens are kept.
        copies: a table [S, 1] float32, written at the slots: 1 where the gain is at least the number beside it, else 0.
        implementation: see `learn`.
    """
    module = module_of(__package__, state.tried, implementation)
    result: Worth = module.worth(state, slots, drafts, other, copies)
    return result


def survivals(state: State, slots: Any, drafts: Drafts, implementation: str | None = None) -> Any:
    """[R, K] float64: how likely all tokens of each draft up to each place are accepted."""
    accept_probs = state.shared_tried.new_empty(drafts.confidence.shape)
    predict(state, slots, drafts, accept_probs, implementation, keeps=False)
    return accept_probs.cumprod(dim=1)
