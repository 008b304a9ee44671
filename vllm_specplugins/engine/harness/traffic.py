"""Traffic that a timed engine is given, and records of how it was served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one kind.

    Args:
        prompts: token ids of each.
        temperature: of all.
        max_tokens: length limit of an output, or that of each output.
        at_a_time: how many are served together; one that is done makes room for the next.
        ignore_eos: whether a request that has ended its text goes on to max_tokens.
        salt: `cache_salt` of all: nothing is known to them of earlier requests of another salt.
        arrivals: seconds from the beginning at which each request arrives, in order; None: as soon as there is room.
        sampling: more arguments of SamplingParams, of StructuredOutputsParams under "structured_outputs".
        logged: index of each request's row in the log that the engine is forced to emit; see forced.py.
    """

    prompts: Sequence[Sequence[int]]
    temperature: float
    max_tokens: int | Sequence[int]
    at_a_time: int
    ignore_eos: bool = False
    salt: str | None = None
    arrivals: Sequence[float] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logged: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Forced:
    """A log that an engine is forced to emit; arguments of ForcedLog.specplugins_force (forced.py)."""

    outputs: Sequence[Sequence[int]]
    accepted: Sequence[Sequence[int]] | None = None


@dataclass(slots=True)
class Answer:
    """What one request got, and when.

    Args:
        token_ids: [num_tokens] of the output.
        first_ms: from its arrival to its first token.
        step_ms: [num_steps] from each step that gave it tokens to the next one that did.
        num_first: tokens of the first step.
    """

    token_ids: list[int] = field(default_factory=list)
    first_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    num_first: int = 0

    def add(self, token_ids: Sequence[int], elapsed_ms: float) -> None:
        """The tokens of a step."""
        if self.token_ids:
            self.step_ms.append(elapsed_ms)
        else:
            self.first_ms, self.num_first = elapsed_ms, len(token_ids)
        self.token_ids += token_ids


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine made of some traffic.

    Args:
        seconds: from the first arrival to the last token.
        answers: in the order of the prompts.
        cpu_seconds: CPU time of the engine's thread, which on a CPU runs the model, too.
        num_drafts: how often a request's step had a draft.
        num_draft_tokens: how many tokens these held.
        num_accepted_tokens: how many of them were accepted.
        num_faults: of our proposer, which cost it drafts; none without speculation.
        steps: of each engine step in which all requests decoded: the tokens that it verified, and its ms.
    """

    seconds: float
    answers: list[Answer]
    cpu_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_faults: int = 0
    steps: Sequence[tuple[int, float]] = ()

    @property
    def tokens_per_second(self) -> float:
        """Prompts included."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def num_steps(self) -> int:
        """Of all requests, without those of their first tokens."""
        return sum(len(answer.step_ms) for answer in self.answers)

    @property
    def num_decoded(self) -> int:
        """Tokens of these steps."""
        return sum(len(answer.token_ids) - answer.num_first for answer in self.answers)

    @property
    def tokens_per_step(self) -> float:
        """Mean of these steps; 1 where all outputs ended with their first token."""
        return self.num_decoded / self.num_steps if self.num_steps else 1.0

    @property
    def step_ms(self) -> float:
        """Mean time of such a step; 1 where there was none."""
        return sum(sum(answer.step_ms) for answer in self.answers) / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What an engine runs on: the device's name, the dtype that it computes in, and vLLM's model runner."""

    device: str
    dtype: str
    runner: str
