"""The value types between engine and proposers, and the protocol that a proposer follows.

Engine-neutral: the same proposer runs on both of vLLM's model runners. Dimensions: num_reqs requests of a step
that may get a draft, K = num_speculative_tokens.

What is public: ProposerContext, DraftBatch, Draft, Feedback, RequestFault and Proposer. PROTOCOL_VERSION goes up by one
with every change that a working proposer could notice: a field that goes or means something else, a method that is
called at another place or must be there. A new field with a default, or a new method that may be absent, leaves it as
it is. A class may say `protocol_version = 1`; one that says another version is refused before the engine starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 1

Int32Array = npt.NDArray[np.int32]
T = TypeVar("T")


class RequestFault(Exception):
    """What a proposer raises where something of one request is to blame: that request gets no more drafts.

    Args:
        request_id: one of the batch; the others go on, and nothing counts towards switching the proposer off.
        reason: for the log.
    """

    def __init__(self, request_id: str, reason: str):
        super().__init__(request_id, reason)
        self.request_id, self.reason = request_id, reason


def _own(value: T) -> T:
    return value


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer may know about the engine when it is built.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: most tokens that a request can have.
        max_num_reqs: most requests in one batch.
        max_num_draft: K.
        tokenize: text to token ids, without special tokens; slow (it may load the tokenizer).
        device: where the target is (a torch.device).
        dtype: what the target computes in (a torch.dtype).
        time_budget_ms: longest that a proposer that runs on the host may take for one step; None: as long as it likes.
        num_ranks: of the tensor-parallel group.
        rank: of this process among those that draft for the same requests.
        agreed: a value (times, drafts) to that which rank 0 has; every rank calls it at the same places.
        setting: what the times of steps depend on, in words: model, device, versions.
        file_suffix: what the names of files end with that this engine saves to, since several may have one
            configuration; None in a process that shall save nothing: another rank does.
    """

    vocab_size: int
    max_model_len: int
    max_num_reqs: int
    max_num_draft: int
    tokenize: Callable[[str], list[int]]
    device: Any = "cpu"
    dtype: Any = None
    time_budget_ms: float | None = None
    num_ranks: int = 1
    rank: int = 0
    agreed: Callable[[Any], Any] = _own
    setting: str = ""
    file_suffix: str | None = ""


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

    def share(self, end_layer: int) -> float:
        """What part of the target's weights a token drafted behind layers [0, end_layer) reads, its head included."""

    def normed(self, hidden_states: Any) -> Any:
        """The target's final norm of hidden states [N, hidden_size]."""

    def logits(self, hidden_states: Any) -> Any:
        """The target's logits [N, vocab_size] of normed hidden states [N, hidden_size]."""

    def argmax(self, hidden_states: Any) -> Any:
        """Token ids [N] of the largest of these logits; under tensor parallelism they are never gathered."""


@dataclass(frozen=True, slots=True)
class Early:
    """What the target's pass of this step has left behind early layers. T: most tokens that it gives a request, K + 1.

    Args:
        states: by number of layers, [num_tokens_of_the_step, hidden_size] behind so many, without a norm.
        places: [num_reqs, T] int64, from which of these each token that came out was said.
        token_ids: [num_reqs, T] int64, the tokens that came out.
        num_tokens: [num_reqs] int64, how many there are; what stands behind them is ignored.
    """

    states: Mapping[int, Any]
    places: Any
    token_ids: Any
    num_tokens: Any


@dataclass(frozen=True, slots=True)
class Target:
    """The target as a model proposer sees it, on the target's device.

    Args:
        forward: runs the target's layers for the requests of the batch.
        last_token_ids: [num_reqs] int32, each request's newest token, whose keys and values are not written yet.
        num_tokens: [num_reqs] int64, length of each request with that token.
        last_hidden_states: [num_reqs, hidden_size], from which the newest token was sampled.
        sampling: temperatures and seeds.
        edit: (logits [num_reqs, vocab_size], drafts [num_reqs, T], positions [num_reqs]) to the logits as verification
            will edit them behind these T drafts (bias, penalties, forbidden tokens), for the tokens at these positions;
            None where no request asks for that.
        early: what stood behind early layers in this step; None unless an exit's layer is chosen while serving.
    """

    forward: PagedForward
    last_token_ids: Any
    num_tokens: Any
    last_hidden_states: Any
    sampling: Sampling
    edit: Callable[[Any, Any, Any], Any] | None = None
    early: Callable[[], Early] | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer built into the engine drafted in this step, before ours is asked.

    Args:
        token_ids: [num_reqs, K] int32.
        ms: how long that took.
        chances: [num_reqs, K] float32, how likely it thinks it is that each token is accepted if those before it are;
            None where it does not say.
    """

    token_ids: Int32Array
    ms: float
    chances: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The token that the target found likeliest behind each one that it read in the step before, rejected drafts
    included. Arrays that cannot be written to; N: such places.

    Args:
        requests: [N] int32, whose place it is, an index into the batch; in ascending order.
        token_ids: [N] int32, the token that was read.
        next_ids: [N] int32, the likeliest behind it.
    """

    requests: Int32Array
    token_ids: Int32Array
    next_ids: Int32Array


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests that want a draft in this step. A proposer gets one of its own, in which nothing can be written.

    Args:
        request_ids: one id a request, stable from its first step to `forget`.
        token_ids: a request's prompt and output so far, [num_tokens] int32 each; read-only views that are valid
            during the call only. Empty for a model proposer: the tokens need not be on the host.
        max_num_draft: [num_reqs] int32, most tokens wanted for each request: 0..K.
        options: `SamplingParams.extra_args["specplugins"]` of each request, empty where it has none; lists are tuples.
        target: the target, for a model proposer.
        offer: the drafts of a cascade's stage that is built into the engine; None where it could not draft.
        likeliest: what the target found in the step before; None unless the method reads that (token_recycling).
    """

    request_ids: Sequence[str]
    token_ids: Sequence[Int32Array]
    max_num_draft: Int32Array
    options: Sequence[Mapping[str, Any]]
    target: Target | None = None
    offer: Offer | None = None
    likeliest: Likeliest | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a proposer guesses for a batch, in the batch's order: this class and NumPy's arrays, no subclasses.

    Args:
        token_ids: [num_reqs, <= K] int32, an array, or a tensor of a model proposer; what stands past a
            request's num_draft is ignored.
        num_draft: [num_reqs] int32, 0 where it has no guess.
        confidence: [num_reqs] float32, finite, larger is surer, in the proposer's own unit (match length, probability).
        logits: [num_reqs, <= K, vocab_size], of the width of token_ids, of a model proposer that samples: q is their
            softmax at the request's temperature. None means that q is one-hot, as that of a proposer that runs on the
            host always is: tokens that it draws are verified as exactly, and it must not return logits.
        stage: [num_reqs] int32, which stage of a cascade made the draft.
    """

    token_ids: Any
    num_draft: Int32Array
    confidence: npt.NDArray[np.float32] | None = None
    logits: Any = None
    stage: Int32Array | None = None

    @classmethod
    def empty(cls, num_reqs: int) -> "Draft":
        """A draft of no token for each of num_reqs requests."""
        return cls(np.empty((num_reqs, 0), np.int32), np.zeros(num_reqs, np.int32))


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the target made of the drafts that it verified in the last step.

    Args:
        request_ids: requests that took part, with or without a draft.
        num_draft: [num_reqs] int32, draft tokens verified.
        num_accepted: [num_reqs] int32, how many of them were accepted.
        step_ms: how long the step took without the drafting before it, if all that it did was decoding.
    """

    request_ids: Sequence[str]
    num_draft: Int32Array
    num_accepted: Int32Array
    step_ms: float | None = None


class Proposer(Protocol):
    """Guesses the next tokens of requests. It is called from one thread, one call at a time."""

    def propose(self, batch: DraftBatch) -> Draft:
        """A draft for every request of the batch."""

    def observe(self, feedback: Feedback) -> None:
        """Learns what became of the last drafts; called before the `propose` of the same step."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops all state of requests that finished, were aborted or were preempted; unknown ids are ignored.

        A preempted request comes back under the same id with its whole history.
        """
