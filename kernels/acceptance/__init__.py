"""Estimates the probability that each draft token is accepted, given that the tokens before it are accepted.

    p = (accepted + w * prior) / (tried + w),    prior = shared_accepted / shared_tried

Far more often than a constant rate predicts, a draft is accepted as a whole or rejected at its first token: when a
match of 3 tokens predicts the next token correctly, it becomes a match of 4. The model therefore counts tokens by
request, stage and bin, and the bin rises along a draft. A request's counts fade by DECAY with each draft of the request
that has such tokens; the shared counts, of all requests, fade by SHARED_DECAY with each step. A step adds at most
MAX_STEP_TOKENS to a shared bin: the requests of a step are often alike, and a single step could otherwise ruin a bin's
rate. A step calls `observe` with the outcome of the newest drafts, then `predict` with the next. R: rows, S: slots of
requests, M: stages, B: bins, K: max draft tokens.
"""

from typing import Any, NamedTuple

from ..history_match import LONGEST_MATCH
from ..implementations import module_of

DECAY = 0.8  # decay per draft: three drafts halve a request's counts, since its text changes
SHARED_DECAY = 0.99  # per step
MAX_STEP_TOKENS = 8.0  # maximum tokens that one step adds to a shared bin
PRIOR_WEIGHT = 8.0  # w, in tokens
# w on the host, where the gate chooses for single requests; with 6, it stops too late. The device needs more: with 5,
# 128 requests with good drafts lose 1 %.
HOST_PRIOR_WEIGHT = 5.0
# The longest match of each bin but the last one, in tokens. A drafter's probability p is in the bin of a match of n
# tokens with 1 - p = 1 / n^2. A bin's first prior has the weight of w tokens. Ten bins do not play better.
BIN_ENDS = *(2.0**power for power in range(1, 5)), float(LONGEST_MATCH)
FIRST_PRIORS = *(1 - 1 / end for end in BIN_ENDS), 0.99
NUM_BINS = len(FIRST_PRIORS)


class State(NamedTuple):
    """Counts, and the newest drafts; float64 unless noted.

    Args:
        tried, accepted: [S, M, B] decaying counts of each request's tokens; the shared counts of all requests are [M,
            B].
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
    """Drafts to verify, `num_draft` [R] int tokens each, of these stages [R, K] int. `confidence` [R, K] int or float
    is an acceptance probability if it is below 1, and the length of a match otherwise."""

    num_draft: Any
    stage: Any
    confidence: Any


class Other(NamedTuple):
    """Another stage. If it `continues`, it can draft after any number of a draft's tokens, otherwise only in place of
    the draft. Its tokens end at `depth`, counted from the draft's beginning. `asked` [R] int32 has its max tokens; 0
    leaves a draft whole."""

    stage: int
    depth: int
    continues: bool
    asked: Any


class Worth(NamedTuple):
    """The expected number of accepted tokens of a draft, [R] float64; and the number of its tokens to send that
    maximises this expectation, [R] int32."""

    gain: Any
    num_kept: Any


def observe(
    state: State,
    # [R] int64; rows that share a slot have verified no token
    slots: Any,
    # [R] int32 each; a row accepted one token less than it sampled, and verified the accepted and the rejected ones
    num_sampled: Any,
    num_rejected: Any,
    implementation: str | None = None,
) -> None:
    """Counts the outcome of the newest drafts once per `predict`; a token after the first rejected one does not count
    as tried. `implementation`: "reference" or "fused"; None: fused on a GPU, else the reference."""
    module_of(__name__, state.tried, implementation).observe(state, slots, num_sampled, num_rejected)


def predict(
    state: State,
    slots: Any,
    drafts: Drafts,
    accept_probs: Any,
    implementation: str | None = None,
    keeps: bool = True,
    tables: tuple[Any, Any] | tuple[()] = (),
) -> None:
    """Writes each token's acceptance probability, and 0 after a draft's end, to `accept_probs` [R, K] float, and to the
    rows `slots` [R] int64 of zero or two `tables` [S, K] float. `keeps`: whether `observe` will receive the outcome of
    these drafts.

    >>> import torch
    >>> from vllm_specplugins.kernels.acceptance.reference import new_state
    >>> state, slots, accept_probs = new_state(1, 3, 4, None), torch.tensor([2]), torch.zeros(1, 4)
    >>> drafts = Drafts(torch.tensor([3]), torch.zeros(1, 4).long(), torch.tensor([[2, 3, 9, 10]]))
    >>> predict(state, slots, drafts, accept_probs)
    >>> accept_probs.tolist()
    [[0.5, 0.75, 0.9375, 0.0]]
    >>> for _ in range(9):
    ...     predict(state, slots, drafts, accept_probs)
    ...     observe(state, slots, torch.tensor([3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    >>> (accept_probs > torch.tensor([0.5, 0.75, 0.9375, 0.0])).tolist()
    [[True, True, False, False]]
    """
    module_of(__name__, state.tried, implementation).predict(state, slots, drafts, accept_probs, keeps, tables)


def survivals(state: State, slots: Any, drafts: Drafts, implementation: str | None = None) -> Any:
    """Returns the probability that a draft is accepted up to each position, [R, K] float64."""
    accept_probs = state.shared_tried.new_empty(drafts.confidence.shape)
    predict(state, slots, drafts, accept_probs, implementation, keeps=False)
    return accept_probs.cumprod(dim=1)


def worth(
    state: State,
    slots: Any,  # [R] int64
    drafts: Drafts,
    other: Other | None = None,
    reports: Any = None,
    implementation: str | None = None,
) -> Worth:
    """Compares drafts with another stage, in one launch. Without `other` all tokens are sent. `reports` [S, 2]
    float32 gets the gain of each slot's draft and, with `other`, the acceptance rate of the other stage's tokens."""
    result: Worth = module_of(__name__, state.tried, implementation).worth(state, slots, drafts, other, reports)
    return result
