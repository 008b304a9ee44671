"""Acceptance probability of each draft token: a small model for each stage, that learns from what was verified.

Drafts are right all along or not at all far more often than a constant rate would have them: where a match of 3 tokens
was right about the next one, it is a match of 4. So a request's record of acceptance is kept by stage and by grade of
confidence, which grows along a draft. Logistic regression goes by that record, by the confidence itself and by the
token's place. The weights follow each step's gradient over the curvature met so far, which forgets slowly.

Front doors: `learn`, `predict` and `num_worth` pick the implementation. They wait for nothing, so a CUDA graph can
record them. R: rows of the batch, S: slots of requests, M: stages, G: grades, F: features, K: most tokens of a draft.
"""

from importlib import import_module
from typing import Any, NamedTuple

from ..implementations import implementation_of

DECAY = 0.8  # of a request's record of a stage, by draft; half of it is forgotten after three drafts
SHARED_DECAY = 0.98  # of the record of all requests
PRIOR_WEIGHT = 4.0  # the record of all requests counts as so many tokens of a request's own
# What the record of all requests begins with, as if so many tokens had been tried, by grade: a long match stands alone,
# a short one hardly. One guess for all is less than what a token may cost many requests: drafts would end where a grade
# begins, and it would stay untried.
FIRST_GUESSES = 0.5, 0.65, 0.8, 0.9
NUM_GRADES = len(FIRST_GUESSES)
NUM_FEATURES = 4  # 1, confidence, place, record
RECORD = 3  # the feature that a new model goes by alone
FEWEST = 0.02  # the record's chance counts as at least this and at most 1 less this
FIRST_CURVATURE = 4.0  # how much a weight's first value is worth
CURVATURE_DECAY = 0.995  # by step
STEP = 0.5  # of what the curvature of one weight alone would allow: weights move together


class State(NamedTuple):
    """What is known, and what was sent to be verified; float64 but where said otherwise.

    Args:
        tried, accepted: [S, M, G] decaying counts of a request's tokens.
        shared_tried, shared_accepted: [M, G] of all requests.
        weights, curvature: [M, F] of the regression.
        num_sent: [S] int32, tokens of the newest draft.
        sent_stage, sent_confidence: [S, K] int32 and float64, of its tokens.
    """

    tried: Any
    accepted: Any
    shared_tried: Any
    shared_accepted: Any
    weights: Any
    curvature: Any
    num_sent: Any
    sent_stage: Any
    sent_confidence: Any


class Drafts(NamedTuple):
    """What is to be verified.

    Args:
        num_draft: [R] int.
        stage: [R, K] int, who drafted each token.
        confidence: [R, K] int or float, in that stage's unit.
    """

    num_draft: Any
    stage: Any
    confidence: Any


def learn(
    state: State,
    # [R] int64; of rows that share one, none has anything verified
    slots: Any,
    # [R] int32 each; accepted is one less than sampled, verified is that and the rejected ones
    num_sampled: Any,
    num_rejected: Any,
    implementation: str | None = None,
) -> None:
    """What became of the newest drafts, of which maybe not all tokens were verified; once for each `predict`.

    Tokens after the first rejected one were not tried. The record of all requests changes as if one draft after the
    other had been added.

    Args:
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.
    """
    _module(state, implementation).learn(state, slots, num_sampled, num_rejected)


def predict(state: State, slots: Any, drafts: Drafts, accept_probs: Any, implementation: str | None = None) -> None:
    """Fills in the chance of each token if those before it are accepted, 0 after a draft's end; the drafts are kept.

    Args:
        slots: [R] int64.
        accept_probs: [R, K] float, written.
        implementation: see `learn`.

    >>> import torch
    >>> from vllm_specplugins.kernels.acceptance.state import new_state
    >>> state, slots, chances = new_state(1, 3, 4, None), torch.tensor([2]), torch.zeros(1, 4)
    >>> drafts = Drafts(torch.tensor([3]), torch.zeros(1, 4).long(), torch.tensor([[2, 3, 9, 10]]))
    >>> predict(state, slots, drafts, chances)
    >>> chances.tolist()
    [[0.5, 0.6499999761581421, 0.8999999761581421, 0.0]]
    >>> for _ in range(9):
    ...     predict(state, slots, drafts, chances)
    ...     learn(state, slots, torch.tensor([3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    >>> (chances > torch.tensor([0.5, 0.6, 0.9, 0.0])).tolist()
    [[True, True, False, False]]
    """
    _module(state, implementation).predict(state, slots, drafts, accept_probs)


def num_worth(
    state: State,
    slots: Any,
    drafts: Drafts,
    than: int,
    depth: int,
    implementation: str | None = None,
) -> Any:
    """[R] int32: how many tokens of each draft to keep, for most to be accepted, where another stage goes on.

    Args:
        slots: [R] int64.
        than: the other stage.
        depth: its tokens end there, counted from the draft's beginning.
        implementation: see `learn`.
    """
    return _module(state, implementation).num_worth(state, slots, drafts, than, depth)


def _module(state: State, implementation: str | None) -> Any:
    return import_module(f".{implementation_of(state.tried, implementation)}", __name__)
