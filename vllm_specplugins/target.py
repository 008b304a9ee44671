"""Defines the target for model proposers (`DraftBatch.target`), and inputs that only some proposers get. draft.py
explains the dimensions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Layers = int | tuple[int, ...]  # the number of first layers, or indices of layers


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling state of a batch's requests, on the engine's device.

    Args:
        temperature: [num_reqs] float32; 0 is greedy.
        seeds: [num_reqs] int64, seeds for the random numbers of this step's drafts; verification uses other random
            numbers.
        verified: `kernels.rejection.Sampling` with [num_reqs] entries, the parameters and random numbers of
            verification; None if vLLM verifies.
    """

    temperature: Any
    seeds: Any
    verified: Any = None


class PagedForward(Protocol):
    """Runs layers of the target for T new tokens of each request, on the target's paged KV cache, without waiting for
    the device. K slots are reserved, so positions may exceed the newest token's position by up to K - 1. If the
    attention backend permits it, the attention metadata of single tokens is updated in place.
    """

    def hidden_states(self, layers: Layers, token_ids: Any, positions: Any, normed: bool = True) -> Any:
        """Returns hidden states [num_reqs, hidden_size] or [num_reqs, T, hidden_size] after these layers.

        Args:
            layers: layers to run.
            token_ids: [num_reqs] or [num_reqs, T] int, the tokens to feed.
            positions: int64 positions of these tokens, of the same shape, consecutive within a request. The call writes
                keys and values there, and verification overwrites them.
            normed: whether to apply the target's final norm.
        """

    def embeddings(self, token_ids: Any) -> Any:
        """Returns inputs of the first layer, [..., hidden_size], for token ids [...]."""

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: Any, positions: Any, normed: bool = True
    ) -> Any:
        """Like `hidden_states`, for layers [first_layer, end_layer) with inputs `states` [..., hidden_size]."""

    def logits(self, hidden_states: Any) -> Any:
        """Returns logits [N, vocab_size] of normed hidden states [N, hidden_size]."""

    def argmax(self, hidden_states: Any) -> Any:
        """Returns token ids [N] of the largest logits; with tensor parallelism it does not gather the logits."""


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The sizes that a trained part must match. They are known before an engine loads weights."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_draft: int  # the longest draft


@dataclass(frozen=True, slots=True)
class Target:
    """The target for a batch, on its device.

    Args:
        forward: runs the target's layers.
        last_token_ids: [num_reqs] int32, each request's newest token; its keys and values are not written yet.
        num_tokens: [num_reqs] int64, the length of each request including that token.
        last_hidden_states: [num_reqs, hidden_size], from which the newest token was sampled.
        sampling: temperatures and seeds.
        edit: maps (logits [N, vocab_size], drafts [N, T], positions [N], counts [N] or None: T) to logits with
            verification's edits (bias, penalties, forbidden tokens) after that many draft tokens, for the tokens at
            these positions. Each request has the same number of the N rows. None if no request has edits.
    """

    forward: PagedForward
    last_token_ids: Any
    num_tokens: Any
    last_hidden_states: Any
    sampling: Sampling
    edit: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The training data of a step: N positions with accepted tokens, and the tokens that the target emitted after them.

    Args:
        request_ids, options, temperatures: ids, options and temperatures of the requests that emitted tokens.
        counts: positions of each request.
        positions: [N] positions within the request, consecutive.
        token_ids: [N] int32 at these positions.
        next_ids: [N] int32 emitted after them.
        states: [N, hidden_size] after the final norm, on the target's device. Each row begins with the states of an
            exit in training, if any, with NaN if the exit did not run.
        gone: requests that ended since the last step.
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
