"""Counts drafted tokens, accepted tokens and faults, for logs, metrics and `specplugins_stats`."""

import copy
from collections import Counter as Histogram
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Feedback

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StageCounters:
    """Running totals of one stage of a cascade; the unit is tokens unless noted."""

    drafted: int = 0
    kept: int = 0  # tokens that the next stage kept; for the last stage, tokens sent to the target
    accepted: int = 0
    ms: float = 0.0  # that the stage took
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    switched_off: bool = False
    times_switched_off: int = 0
    pause_s: float = 0.0  # the last one
    asked: int = 0  # requests times steps
    drafts: int = 0  # requests of those whose draft by this stage was sent to the target
    verified: int = 0  # tokens of `kept` that the target verified
    accepted_at: list[int] = field(default_factory=list)  # by position in the request's draft
    gate_lengths: list[int] = field(default_factory=list)  # number of times that the gate chose each length, from 0 on

    def add(self, by_place: Ints, sums: Ints) -> None:
        """Adds the counts of kernels/steps: tokens by [KINDS, K], and SUMS."""
        verified, accepted, kept = by_place
        asked, drafted, drafts, confirmed = sums.tolist()
        self.verified += int(verified.sum())
        self.accepted += int(accepted.sum())
        self.kept += int(kept.sum()) + confirmed
        self.asked, self.drafted, self.drafts = self.asked + asked, self.drafted + drafted, self.drafts + drafts
        count_all(self.accepted_at, accepted)


@dataclass(slots=True)
class Counters:
    request_steps: int = 0  # steps of single requests that emitted a token
    drafts: int = 0  # steps of those that verified a draft
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    propose_ms: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    stages: dict[str, StageCounters] = field(default_factory=dict)  # of a cascade
    whole: StageCounters = field(default_factory=StageCounters)  # the method, counted like a stage
    draft_lengths: list[int] = field(default_factory=list)  # number of drafts of each length, from 0 on
    switched_off: bool = False
    times_switched_off: int = 0
    pause_s: float = 0.0  # the last one

    def summary(self) -> str:
        """Returns one line for a log.

        >>> Counters(request_steps=4, drafts=2, drafted_tokens=6, accepted_tokens=3).summary()
        '1.75 tokens per step, 50 % of 4 steps with a draft; drafted 6, accepted 3'
        """
        steps = max(1, self.request_steps)
        words = [
            f"{1 + self.accepted_tokens / steps:.2f} tokens per step, {100 * self.drafts / steps:.0f} % of "
            f"{self.request_steps} steps with a draft; drafted {self.drafted_tokens}, accepted {self.accepted_tokens}"
        ]
        for name, stage in self.stages.items():
            counts = f"drafted {stage.drafted}, kept {stage.kept}, accepted {stage.accepted}, {stage.ms:.0f} ms"
            words.append(f"stage {name}: {counts}")
        parts: dict[str, Counters | StageCounters] = {"": self, **self.stages}
        for name, part in parts.items():
            if part.faults:
                off = f", switched off {part.times_switched_off} times" if part.times_switched_off else ""
                words.append(f"{name} faults: {part.faults}{off}{' (now)' if part.switched_off else ''}".lstrip())
        return "; ".join(words)

    def net(self, num_steps: int, dropped: Sequence[int]) -> "Counters":
        """Returns a copy with this number of steps, minus the dropped accepted tokens, given by position.

        >>> Counters(7, accepted_tokens=3, whole=StageCounters(accepted=3, accepted_at=[2, 1])).net(5, [0, 1]).summary()
        '1.40 tokens per step, 0 % of 5 steps with a draft; drafted 0, accepted 2'
        """
        result = copy.deepcopy(self)
        result.request_steps = num_steps
        for place, num in enumerate(dropped):
            stages = [stage for stage in result.stages.values() if place < len(stage.accepted_at)]
            largest = sorted(stages, key=lambda stage: stage.accepted_at[place])[-1:]
            for part in (result.whole, *largest):
                if place < len(part.accepted_at):
                    part.accepted_at[place] -= num
                    part.accepted -= num
        result.accepted_tokens = result.whole.accepted
        return result

    def add(self, feedback: Feedback) -> None:
        self.add_fates(Histogram(zip(feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)))

    def add_fates(self, num_requests: Mapping[tuple[int, int], int]) -> None:
        """Adds the outcomes of a step: the number of requests by (verified tokens, accepted tokens)."""
        for (verified, accepted), requests in num_requests.items():
            self.request_steps += requests
            self.drafts += requests * (verified > 0)
            self.drafted_tokens += requests * verified
            self.accepted_tokens += requests * accepted
            for position in range(accepted):
                count(self.whole.accepted_at, position, requests)
        self.whole.verified, self.whole.accepted = self.drafted_tokens, self.accepted_tokens

    def add_drafts(self, num_asked: int, num_requests: Mapping[int, int]) -> None:
        """Counts new drafts: the number of requests that wanted a draft, and of requests by draft length."""
        self.whole.asked += num_asked
        for length, requests in num_requests.items():
            self.whole.drafts += requests * (length > 0)
            self.whole.drafted += requests * length
            count(self.draft_lengths, length, requests)
        self.whole.kept = self.whole.drafted


class RequestRates:
    """Computes the acceptance rates of single requests, from their first to their last step."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # tokens verified and accepted
        self._over: set[str] = set()  # requests that ended since the last feedback, which may name them once more

    def add(self, feedback: Feedback) -> None:
        over, self._over = self._over, set()
        fates = zip(feedback.request_ids, feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)
        for request_id, num_draft, num_accepted in fates:
            if num_draft and request_id not in over:
                verified, accepted = self._counts.get(request_id, (0, 0))
                self._counts[request_id] = (verified + num_draft, accepted + num_accepted)

    def take(self, request_ids: Sequence[str]) -> list[float]:
        """Returns the rates of the ended requests that had drafts."""
        self._over.update(request_ids)
        counts = [self._counts.pop(request_id, None) for request_id in request_ids]
        return [count[1] / count[0] for count in counts if count is not None]


def faults_of(stats: Mapping[str, Any]) -> dict[str, int]:
    """Returns the faults by kind of a method and its stages, from the dictionary of Counters.

    >>> faults_of({"faults": {"raised": 1}, "stages": {"0 custom": {"faults": {"raised": 2}}}})
    {'raised': 3}
    """
    return dict(sum((Histogram(stage["faults"]) for stage in stats["stages"].values()), Histogram(stats["faults"])))


def count(totals: list[int], index: int, more: int = 1) -> None:
    """Adds a number to an entry of a list, which grows if necessary.

    >>> totals = [1]
    >>> count(totals, 2)
    >>> totals
    [1, 0, 1]
    """
    if index >= len(totals):
        totals.extend([0] * (index + 1 - len(totals)))
    totals[index] += more


def count_all(totals: list[int], more: Ints) -> None:
    for index in np.flatnonzero(more).tolist():
        count(totals, index, int(more[index]))
