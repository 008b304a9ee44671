"""The value types between engine and proposers, and the protocol that a proposer follows, on both model runners.

Public: ProposerContext, Codec, DraftBatch, Draft, Feedback, RequestFault and Proposer. Dimensions: num_reqs requests of
a step that may get a draft, K = num_speculative_tokens. PROTOCOL_VERSION goes up by one with every change that a
working proposer could notice. A class may say `protocol_version = 1`; one that says another is refused at the start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_specplugins.target import Int32Array, Offer, Target

PROTOCOL_VERSION = 1

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


class Codec(Protocol):
    """Token ids to the bytes of their text, and back, without what begins a text; a token may end within a character.
    A long text holds the interpreter's lock: 0.2 ms for each 1,000 bytes."""

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The text of these tokens; of special ones their names."""

    def tokenize_bytes(self, text: bytes) -> list[int]:
        """The tokens of a text, none of them special."""


def _no_codec() -> Codec:
    raise ValueError("the engine has no tokenizer")


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer may know about the engine when it is built.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: most tokens that a request can have.
        max_num_reqs: most requests in one batch.
        max_num_draft: K.
        tokenize: text to token ids, without special tokens; slow (it may load the tokenizer).
        codec: makes what also turns token ids into text; slow. ValueError: the tokenizer cannot.
        device, dtype: where the target is, and what it computes in (torch's).
        time_budget_ms: longest that a proposer on the host may take for one step; None: as long as it likes.
        num_ranks, rank: of the tensor-parallel group, whose members draft for the same requests.
        agreed: a value (times, drafts) to that which rank 0 has; every rank calls it at the same places.
        file_suffix: what names of files end with that this engine saves to; None: another rank saves.
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
    agreed: Callable[[Any], Any] = _own
    file_suffix: str | None = ""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests that want a draft in this step. A proposer gets one of its own, in which nothing can be written.

    Args:
        request_ids: one id a request, stable from its first step to `forget`.
        token_ids: a request's prompt and output so far, [num_tokens] int32 each, valid during the call only. Empty for
            a model proposer: the tokens need not be on the host.
        max_num_draft: [num_reqs] int32, most tokens wanted for each request: 0..K.
        options: `SamplingParams.extra_args["specplugins"]` of each request, empty where it has none; lists are tuples.
        target: for a model proposer.
        offer: the drafts of a cascade's stage that is built into the engine; None where it could not draft.
    """

    request_ids: Sequence[str]
    token_ids: Sequence[Int32Array]
    max_num_draft: Int32Array
    options: Sequence[Mapping[str, Any]]
    target: Target | None = None
    offer: Offer | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a proposer guesses for a batch, in the batch's order: this class and NumPy's arrays, no subclasses.

    Args:
        token_ids: [num_reqs, <= K] int32, an array, or a tensor of a model proposer; ignored past num_draft.
        num_draft: [num_reqs] int32, 0 where it has no guess.
        confidence: [num_reqs] float32, finite, of its first token: a probability, or from 1 on a match's length.
        logits: [num_reqs, <= K, vocab_size], as wide as token_ids, of a model proposer that samples: q is their softmax
            at the request's temperature. None: q is one-hot, as a proposer's on the host always is; tokens that it
            draws are verified as exactly.
    """

    token_ids: Any
    num_draft: Int32Array
    confidence: npt.NDArray[np.float32] | None = None
    logits: Any = None

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
        num_forced: in all, tokens verified and accepted after these drafts, which grammars forced.
    """

    request_ids: Sequence[str]
    num_draft: Int32Array
    num_accepted: Int32Array
    step_ms: float | None = None
    num_forced: tuple[int, int] = (0, 0)


class Proposer(Protocol):
    """Guesses the next tokens of requests. It is called from one thread, one call at a time. A class that extends this
    one learns nothing, and keeps nothing of a request, unless it says how."""

    def propose(self, batch: DraftBatch) -> Draft:
        """A draft for every request of the batch."""

    def observe(self, feedback: Feedback) -> None:
        """Learns what became of the last drafts; called before the `propose` of the same step."""
        return

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops all state of requests that finished, were aborted or were preempted; unknown ids are ignored.

        A preempted request comes back under the same id with its whole history.
        """
        return
