"""Defines the messages between scheduler and workers in addition to vLLM's fields: one object in each direction, as an
attribute of SchedulerOutput and of ModelRunnerOutput. vLLM pickles both in each step, so the objects are small."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAME = "specplugins"
NEVER = [-1]  # a worker's draft for a request that can verify one position only


class Emitted(NamedTuple):
    """Running totals of request steps, and of dropped draft tokens by position."""

    num_steps: int = 0
    dropped: tuple[int, ...] = ()


# By request: the number of draft tokens before the tokens that the scheduler adds, and those tokens.
Forced = Mapping[str, tuple[int, Sequence[int]]]


class ForcedDraft(NamedTuple):
    """Tokens that the scheduler adds after `num_before` tokens of a request's draft."""

    request_id: str
    num_before: int
    token_ids: Sequence[int]


class StepSums(NamedTuple):
    """Counts of steps since the last message, by series: increments, and lists of seconds."""

    counts: tuple[tuple[str, float], ...] = ()
    seconds: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass
class DraftLengths:
    request_ids: Sequence[str]
    lengths: Sequence[int]

    def items(self) -> list[tuple[str, int]]:
        return list(zip(self.request_ids, self.lengths, strict=True))


@dataclass
class StepNews:
    """The scheduler's message with a step."""

    is_off: bool = False  # whether drafting is switched off
    emitted: Emitted | None = None
    verifies: int | None = None  # the previous step's draft length; None: this step's drafts differ
    forced: tuple[ForcedDraft, ...] = ()
    refused: tuple[str, ...] = ()  # requests whose grammar refused the token after the scheduled draft
    sums: StepSums | None = None


@dataclass
class StepFacts:
    """A worker's message with a step's outcome."""

    num_draft: DraftLengths | None = None  # lengths of the newest drafts; None: the scheduler does not use them
    num_verified: int | None = None  # draft tokens, if drafts were trimmed
    draft_seconds: float = 0.0  # on the host
    undrafted: str | None = None  # why the next step has no draft


_NO_FACTS = StepFacts()


def news_of(scheduler_output: Any) -> StepNews:
    """Returns the scheduler's message, or an empty one at first and in steps of vLLM's warm-up."""
    news: StepNews | None = getattr(scheduler_output, _NAME, None)
    if news is None:
        news = StepNews()
        setattr(scheduler_output, _NAME, news)
    return news


def facts_of(output: Any) -> StepFacts:
    return getattr(output, _NAME, _NO_FACTS)


def send_facts(output: Any, facts: StepFacts) -> None:
    setattr(output, _NAME, facts)
