"""Defines the interface between the engine and proposers on both model runners: the protocol and its value types.

Dimensions: num_reqs, the requests of a step that may get a draft; K = num_speculative_tokens. PROTOCOL_VERSION
increases with every change that can break a working proposer. A class with another `protocol_version` is refused at the
start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from vllm_specplugins.target import Int32Array, Target

PROTOCOL_VERSION = 1

T = TypeVar("T")


class RequestFault(Exception):
    """A proposer raises this to end drafting for one request. It does not count towards the circuit breaker.

    Args:
        request_id: the id of a request in the batch.
        reason: the text for the log.
    """

    def __init__(self, request_id: str, reason: str):
        super().__init__(request_id, reason)
        self.request_id, self.reason = request_id, reason


def _same(value: T) -> T:
    return value


class Codec(Protocol):
    """Converts token ids to the bytes of their text and back, without a begin-of-sequence token. A token may end within
    a character. A call holds the GIL for 0.2 ms per 1,000 bytes."""

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Returns the bytes of the tokens' text; special tokens appear by name."""

    def tokenize_bytes(self, text: bytes) -> list[int]:
        """Returns the tokens of a text, without special tokens."""


def _no_codec() -> Codec:
    raise ValueError("the engine has no tokenizer")


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """Limits and services of the engine, for a proposer's constructor.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: limit of a request's tokens.
        max_num_reqs: limit of a batch's requests.
        max_num_draft: K.
        tokenize: converts text to token ids, without special tokens; slow, as it may load the tokenizer.
        codec: creates a `Codec`; slow. Raises ValueError unless the tokenizer is a fast one.
        device, dtype: the target's device and dtype, as torch types.
        time_budget_ms: time limit of a proposer on the host per step; None: no limit.
        num_ranks, rank: size of the tensor-parallel group and place in it; all ranks draft for the same requests.
        agreed: returns rank 0's value (times, drafts) on every rank; all ranks must call it at the same points.
        file_suffix: suffix of this engine's files; None if another rank saves.
    """

    vocab_size: int
    max_model_len: int
    max_num_reqs: int
    max_num_draft: int
    tokenize: Callable[[str], list[int]]
    codec: Callable[[], Codec] = _no_codec
    device: Any = "cpu"
    dtype: Any = None
    time_budget_ms: float | None = None
    num_ranks: int = 1
    rank: int = 0
    agreed: Callable[[Any], Any] = _same
    file_suffix: str | None = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposer's draft for a batch, in the batch's order. On the host it must be exactly this class with NumPy
    arrays, not subclasses.

    Args:
        token_ids: [num_reqs, <= K] int32, an array, or a model proposer's tensor; ignored beyond num_draft.
        num_draft: [num_reqs] int32, 0 for no draft.
        confidence: [num_reqs] float32, finite, the confidence in each first token: a probability, or a match's length
            (from 1 on). Drafters of the engine and of a part of the target rate each token, as wide as token_ids.
        logits: [num_reqs, <= K, vocab_size], as wide as token_ids, for a model proposer that samples: q is their
            softmax at the request's temperature. None: q is one-hot, which is also exact; on the host it must be None.
    """

    token_ids: Any
    num_draft: Any
    confidence: Any = None
    logits: Any = None

    @classmethod
    def empty(cls, num_reqs: int) -> "Draft":
        """Returns an empty draft for every request."""
        return cls(np.empty((num_reqs, 0), np.int32), np.zeros(num_reqs, np.int32))

    @classmethod
    def whole(cls, token_ids: Any, confidence: Any = None, logits: Any = None) -> "Draft":
        """Returns a draft of all these tokens for every request."""
        return cls(token_ids, np.full(len(token_ids), token_ids.shape[1], np.int32), confidence, logits)


@dataclass(frozen=True, slots=True)
class Offer:
    """The draft of a stage that is built into vLLM. The engine makes it before our proposer drafts.

    Args:
        draft: equally many tokens for each request; the confidence is an acceptance probability of each token, given
            that the earlier ones are accepted.
        ms: drafting time.
        has_prompt: the time includes the reading of a prompt.
    """

    draft: Draft
    ms: float
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests that may get a draft in this step; read-only.

    Args:
        request_ids: ids that stay the same from a request's first step to `forget`.
        token_ids: prompt and output of each request, [num_tokens] int32, valid during the call. Empty for a model
            proposer, since its tokens may be on the device only.
        max_num_draft: [num_reqs] int32, the limit of each request's draft, 0 to K.
        options: `SamplingParams.extra_args["specplugins"]` of each request, empty if it has none; lists are tuples.
        target: for a model proposer.
        offer: the drafts of the cascade's stage that is built into vLLM; None if it did not draft.
        prompt_lengths: number of each request's first tokens that are its prompt. Empty for a model proposer.
    """

    request_ids: Sequence[str]
    token_ids: Sequence[Int32Array]
    max_num_draft: Int32Array
    options: Sequence[Mapping[str, Any]]
    target: Target | None = None
    offer: Offer | None = None
    prompt_lengths: Sequence[int] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.request_ids)

    @property
    def tenants(self) -> list[bytes]:
        """Returns the tenant of each request: a hash of its `cache_salt`, or b"" without one. A proposer must not draft
        for one tenant what it learned from another tenant's tokens."""
        return [options.get("tenant", b"") for options in self.options]


@dataclass(frozen=True, slots=True)
class Feedback:
    """The outcome of the drafts in the last step.

    Args:
        request_ids: requests of the step, with or without a draft.
        num_draft: [num_reqs] int32, verified draft tokens.
        num_accepted: [num_reqs] int32, accepted draft tokens.
        step_ms: the step's time without drafting; None unless the step only decoded.
        num_others: the numbers of verified and accepted tokens that others added after these drafts.
        mixed_ms: the time of a step that also read prompts, times the requests' share of its tokens.
        num_refused: [num_reqs] int32, 1 where a grammar refused the token after the verified ones; None: nowhere.
    """

    request_ids: Sequence[str]
    num_draft: Int32Array
    num_accepted: Int32Array
    step_ms: float | None = None
    num_others: tuple[int, int] = (0, 0)
    mixed_ms: float | None = None
    num_refused: Int32Array | None = None


class Proposer(Protocol):
    """Drafts the next tokens of requests. All calls come from one thread. The default `observe` and `forget` do
    nothing. A class on the host may also have `finish(request_id, token_ids, tenant)`: it receives the whole text of a
    request before `forget`, since `propose` may not have seen its end."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Returns a draft for every request of the batch."""

    def observe(self, feedback: Feedback) -> None:
        """Receives the outcome of the last drafts, before `propose` in the same step."""
        return

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops all state of finished, aborted or preempted requests; must ignore unknown ids. A preempted request
        returns with the same id and its whole history.
        """
        return
