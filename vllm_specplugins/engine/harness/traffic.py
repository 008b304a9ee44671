"""Defines the traffic for a timed engine, and the records of its service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    prompts: Sequence[Sequence[int]]  # token ids
    temperature: float
    output_lengths: int | Sequence[int]  # length limit of all outputs, or of each output
    at_a_time: int  # number of concurrent requests; when one ends, the next begins
    ignore_eos: bool = False  # a request continues after its end token up to its output length
    salt: str | None = None  # `cache_salt`: requests do not use outputs of another salt
    arrivals: Sequence[float] | None = None  # seconds from the start, in order; None: as soon as a request ends
    sampling: Mapping[str, Any] = field(default_factory=dict)  # additional arguments of SamplingParams
    logged: Sequence[int] | None = None  # each request's row of the log that the engine emits (forced.py)


@dataclass(frozen=True, slots=True)
class Forced:
    """A log that an engine must emit: the arguments of ForcedLog.specplugins_force (forced.py)."""

    outputs: Sequence[Sequence[int]]
    accepted: Sequence[Sequence[int]] | None = None


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)  # [num_tokens]
    first_ms: float = 0.0  # from its arrival to its first token
    step_ms: list[float] = field(default_factory=list)  # [num_steps] between steps that emitted tokens
    num_first: int = 0  # tokens of the first step

    def add(self, token_ids: Sequence[int], elapsed_ms: float) -> None:
        if self.token_ids:
            self.step_ms.append(elapsed_ms)
        else:
            self.first_ms, self.num_first = elapsed_ms, len(token_ids)
        self.token_ids += token_ids


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float  # from the first arrival to the last token
    answers: list[Answer]  # in the order of the prompts
    cpu_seconds: float = 0.0  # CPU time of the engine's thread, which on a CPU runs the model, too
    num_drafts: int = 0  # steps of a request with a draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_faults: int = 0  # faults of the plugin's proposer, which cost drafts
    steps: Sequence[tuple[int, float]] = ()  # tokens verified by each engine step without a prefill, and its ms

    @property
    def tokens_per_second(self) -> float:
        """Returns output tokens per second, including the time of prompts."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def num_steps(self) -> int:
        """Returns the number of steps of all requests, except for steps that emitted first tokens."""
        return sum(len(answer.step_ms) for answer in self.answers)

    @property
    def num_decoded(self) -> int:
        """Returns the number of tokens that these `num_steps` steps emitted."""
        return sum(len(answer.token_ids) - answer.num_first for answer in self.answers)

    @property
    def tokens_per_step(self) -> float:
        """Returns the mean number of tokens in these steps; 1 if all outputs ended with their first token."""
        return self.num_decoded / self.num_steps if self.num_steps else 1.0

    @property
    def step_ms(self) -> float:
        """Returns the mean time of these steps in ms; 1 if there were none."""
        return sum(sum(answer.step_ms) for answer in self.answers) / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine's device, its compute dtype, and vLLM's model runner."""

    device: str
    dtype: str
    runner: str
