"""What the scheduler and the workers tell each other beside vLLM's fields: one object each way, an attribute of
SchedulerOutput and of ModelRunnerOutput. vLLM pickles both in each step, so the objects are small."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAME = "specplugins"


class Emitted(NamedTuple):
    """Running totals: decoding steps of requests, and dropped draft tokens by position."""

    num_steps: int = 0
    dropped: tuple[int, ...] = ()


class ForcedDraft(NamedTuple):
    """Tokens that the scheduler adds after `num_before` tokens of a request's draft."""

    request_id: str
    num_before: int
    token_ids: Sequence[int]


class StepSums(NamedTuple):
    """Counts of steps since the last ones, by series: increments, and lists of seconds."""

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
    """From the scheduler, with a step.

    Attributes:
        is_off: whether drafting is switched off.
        verifies: the draft length that the step before chose, and this step verifies; None: the drafts differ.
    """

    is_off: bool = False
    emitted: Emitted | None = None
    verifies: int | None = None
    forced: tuple[ForcedDraft, ...] = ()
    sums: StepSums | None = None


@dataclass
class StepFacts:
    """From a worker, with a step's outcome.

    Attributes:
        num_draft: the lengths of the newest drafts; None: they are not planned by.
        num_verified: verified draft tokens, if drafts were trimmed.
        draft_seconds: on the host.
        undrafted: why the next step has no draft.
    """

    num_draft: DraftLengths | None = None
    num_verified: int | None = None
    draft_seconds: float = 0.0
    undrafted: str | None = None


_NO_FACTS = StepFacts()


def news_of(scheduler_output: Any) -> StepNews:
    """The scheduler's news; at first, and in steps of vLLM's warm-up, there are none."""
    news: StepNews | None = getattr(scheduler_output, _NAME, None)
    if news is None:
        news = StepNews()
        setattr(scheduler_output, _NAME, news)
    return news


def facts_of(output: Any) -> StepFacts:
    facts: StepFacts = getattr(output, _NAME, _NO_FACTS)
    return facts


def send_facts(output: Any, facts: StepFacts) -> None:
    setattr(output, _NAME, facts)
