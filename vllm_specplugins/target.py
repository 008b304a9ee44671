"""The target as a model proposer sees it, `DraftBatch.target`, and what else the engine tells some proposers.

Dimensions as in draft.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling state of the requests of a batch, on the device that the engine keeps it on.

    Args:
        temperature: [num_reqs] float32, 0 is greedy.
        seeds: [num_reqs] int64, of noise that the drafts of this step are drawn with and verification is not.
        verified: `kernels.rejection.Sampling` of the requests, [num_reqs] each: all that verification draws with, its
            noise included; None where the engine's own verification draws otherwise.
    """

    temperature: Any
    seeds: Any
    verified: Any = None


class PagedForward(Protocol):
    """Runs layers of the target for new tokens of each request, on the target's own paged KV cache.

    Nothing here waits for the device. Positions of a step may lie up to K - 1 past the newest token: K slots are
    reserved. Attention metadata of single tokens is updated in place where the attention backend can do that.
    T: new tokens of each request.
    """

    def hidden_states(self, end_layer: int, token_ids: Any, positions: Any, normed: bool = True) -> Any:
        """Hidden states [num_reqs, hidden_size] or [num_reqs, T, hidden_size] after layers [0, end_layer).

        Args:
            end_layer: how many layers to run, from the first one on.
            token_ids: [num_reqs] or [num_reqs, T] int, the tokens to feed for each request of the batch.
            positions: of the same shape, int64, where they stand, a request's in a row; their keys and values
                are written there, to be overwritten when the target verifies the draft.
            normed: whether the target's final norm is applied.
        """

    def embeddings(self, token_ids: Any) -> Any:
        """What stands in front of the first layer: [..., hidden_size] of token ids [...]."""

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: Any, positions: Any, normed: bool = True
    ) -> Any:
        """As `hidden_states`, after layers [first_layer, end_layer), of states [..., hidden_size] in front of them."""

    def logits(self, hidden_states: Any) -> Any:
        """The target's logits [N, vocab_size] of normed hidden states [N, hidden_size]."""

    def argmax(self, hidden_states: Any) -> Any:
        """Token ids [N] of the largest of these logits; under tensor parallelism they are never gathered."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a proposer's parts must fit, before an engine loads anything."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_draft: int  # K


@dataclass(frozen=True, slots=True)
class Target:
    """The target as a model proposer sees it, on the target's device.

    Args:
        forward: runs the target's layers for the requests of the batch.
        last_token_ids: [num_reqs] int32, each request's newest token, whose keys and values are not written yet.
        num_tokens: [num_reqs] int64, length of each request with that token.
        last_hidden_states: [num_reqs, hidden_size], from which the newest token was sampled.
        sampling: temperatures and seeds.
        edit: (logits [N, vocab_size], drafts [N, T], positions [N], counts [N] or None: T) to the logits as
            verification will edit them after so many of these drafts (bias, penalties, forbidden tokens), for the
            tokens at these positions; N: rows, as many of each request. None where no request asks for that.
    """

    forward: PagedForward
    last_token_ids: Any
    num_tokens: Any
    last_hidden_states: Any
    sampling: Sampling
    edit: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer built into the engine drafted in this step, before ours is asked.

    Args:
        token_ids: [num_reqs, K] int32.
        ms: how long that took.
        accept_probs: [num_reqs, K] float32, of each token if those before it are accepted; None: it does not say.
    """

    token_ids: Int32Array
    ms: float
    accept_probs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target read in a step at places whose tokens stay, and what it emitted after them. N: places.

    Args:
        request_ids: of the requests that emitted something.
        options: of each.
        temperatures: of each, 0 is greedy.
        counts: places of each.
        positions: [N] where they stand in their request, each request's in a row.
        token_ids: [N] int32 that were read there.
        next_ids: [N] int32 that were emitted after.
        states: [N, hidden_size] after the final norm, on the target's device; before them in a row those of an exit
            that learns, NaN where it read nothing.
        gone: requests that have ended since the last one.
    """

    request_ids: Sequence[str]
    options: Sequence[Mapping[str, Any]]
    temperatures: Sequence[float]
    counts: Sequence[int]
    positions: Sequence[int]
    token_ids: Int32Array
    next_ids: Int32Array
    states: Any
    gone: Sequence[str] = ()
