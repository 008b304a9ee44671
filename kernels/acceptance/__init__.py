"""Acceptance probability of each draft token, by what was accepted of tokens like it.

Drafts are right all along or not at all far more often than a constant rate would have them: where a match of 3 tokens
was right about the next one, it is a match of 4. So tokens are counted by request, stage and grade of confidence, which
grows along a draft. A request's own record fades by draft; that of all requests, which a request's begins with, fades
by step, and what one step adds to it is limited: requests of one step are often of one kind, and would all at once make
a grade look hopeless.

Front doors: `learn` and `predict` pick the implementation. They wait for nothing, so a CUDA graph can record them. On
the host gate/ledger.py has the same model, with a smaller PRIOR_WEIGHT. R: rows of the batch, S: slots of requests, M:
stages, G: grades, K: most tokens of a draft.
"""

from importlib import import_module
from typing import Any, NamedTuple

from ..implementations import implementation_of

DECAY = 0.8  # of a request's record of a grade, by draft; half of it is forgotten after three drafts
SHARED_DECAY = 0.99  # of the record of all requests, by step
MOST_OF_A_STEP = 8.0  # tokens of a grade that one step adds to it
PRIOR_WEIGHT = 8.0  # the record of all requests counts as so many tokens of a request's own
# Each grade's longest match, but for the last one's: a match of 2 tokens is right every other time, one of 32 hardly
# ever wrong. A drafter's probability p counts as the grade whose matches' n has 1 / n^2 = 1 - p.
# And what the record of all requests begins with, as if PRIOR_WEIGHT tokens had been tried.
GRADES = 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 31.0
FIRST_GUESSES = 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99
NUM_GRADES = len(FIRST_GUESSES)


class State(NamedTuple):
    """What is known, and what was sent to be verified; float64 but where said otherwise.

    Args:
        tried, accepted: [S, M, G] decaying counts of a request's tokens.
        shared_tried, shared_accepted: [M, G] of all requests.
        num_sent: [S] int32, tokens of the newest draft.
        sent_stage, sent_confidence: [S, K] int32 and float64, of its tokens.
    """

    tried: Any
    accepted: Any
    shared_tried: Any
    shared_accepted: Any
    num_sent: Any
    sent_stage: Any
    sent_confidence: Any


class Drafts(NamedTuple):
    """What is to be verified.

    Args:
        num_draft: [R] int.
        stage: [R, K] int, who drafted each token.
        confidence: [R, K] int or float: below 1 an acceptance probability, else a match's length.
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

    Tokens after the first rejected one were not tried.

    Args:
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.
    """
    _module(state, implementation).learn(state, slots, num_sampled, num_rejected)


def predict(
    state: State,
    slots: Any,
    drafts: Drafts,
    accept_probs: Any,
    implementation: str | None = None,
    keeps: bool = True,
    tables: tuple[Any, Any] | tuple[()] = (),
) -> None:
    """Fills in the probability of each token to be accepted if those before it are, 0 after a draft's end.

    Args:
        slots: [R] int64.
        accept_probs: [R, K] float, written.
        implementation: see `learn`.
        keeps: whether these are the drafts that `learn` is told of.
        tables: where each slot's probabilities go, too: [S, K] float, two or none.

    >>> import torch
    >>> from vllm_specplugins.kernels.acceptance.state import new_state
    >>> state, slots, found = new_state(1, 3, 4, None), torch.tensor([2]), torch.zeros(1, 4)
    >>> drafts = Drafts(torch.tensor([3]), torch.zeros(1, 4).long(), torch.tensor([[2, 3, 9, 10]]))
    >>> predict(state, slots, drafts, found)
    >>> found.tolist()
    [[0.5, 0.6000000238418579, 0.8999999761581421, 0.0]]
    >>> for _ in range(9):
    ...     predict(state, slots, drafts, found)
    ...     learn(state, slots, torch.tensor([3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    >>> (found > torch.tensor([0.5, 0.6, 0.9, 0.0])).tolist()
    [[True, True, False, False]]
    """
    _module(state, implementation).predict(state, slots, drafts, accept_probs, keeps, tables)


def _module(state: State, implementation: str | None) -> Any:
    return import_module(f".{implementation_of(state.tried, implementation)}", __name__)
