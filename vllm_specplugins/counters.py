"""Running totals: what was drafted, accepted and went wrong, for logs, metrics and `specplugins_stats`."""

import copy
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specplugins.draft import Feedback, Int32Array

Forced = Mapping[str, tuple[int, Sequence[int]]]  # by request, how many tokens of its draft come before, and the tokens


@dataclass(slots=True)
class StageCounters:
    """Running totals of one stage of a cascade: its tokens, those of them that the stage after it kept, or that
    went to the target where there is none, those that the target accepted, and the time it took."""

    drafted: int = 0
    kept: int = 0
    accepted: int = 0
    ms: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    switched_off: bool = False
    times_switched_off: int = 0
    pause_s: float = 0.0  # the last one
    asked: int = 0  # how often it was asked to draft for a request
    drafts: int = 0  # of those, how many it had one for that went to the target
    verified: int = 0  # of the tokens that went to the target, those that the scheduler had it look at
    accepted_at: list[int] = field(default_factory=list)  # by position in the request's draft
    gate_lengths: list[int] = field(default_factory=list)  # how often the gate chose each length, 0 first


@dataclass(slots=True)
class Counters:
    """Running totals over all requests, for logs and `LLM.collective_rpc("specplugins_stats")`."""

    request_steps: int = 0  # steps of single requests that emitted a token
    drafts: int = 0  # of those, how many verified a draft
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    propose_ms: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    stages: dict[str, StageCounters] = field(default_factory=dict)  # of a cascade
    whole: StageCounters = field(default_factory=StageCounters)  # the method as if it were a stage
    draft_lengths: list[int] = field(default_factory=list)  # how often a draft had each length, 0 first
    switched_off: bool = False
    times_switched_off: int = 0
    pause_s: float = 0.0  # the last one

    def summary(self) -> str:
        """One line for a log.

        >>> Counters(request_steps=4, drafts=2, drafted_tokens=6, accepted_tokens=3).summary()
        '1.75 tokens a step, 50 % of 4 steps with a draft; drafted 6, accepted 3'
        """
        steps = max(1, self.request_steps)
        words = [
            f"{1 + self.accepted_tokens / steps:.2f} tokens a step, {100 * self.drafts / steps:.0f} % of "
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

    def net(self, num_steps: int, dropped: Mapping[int, int]) -> "Counters":
        """A copy of so many steps, without accepted tokens that were dropped, by their place in a draft.

        >>> Counters(7, accepted_tokens=3, whole=StageCounters(accepted=3, accepted_at=[2, 1])).net(5, {1: 1}).summary()
        '1.40 tokens a step, 0 % of 5 steps with a draft; drafted 0, accepted 2'
        """
        own = copy.deepcopy(self)
        own.request_steps = num_steps
        for place, num in dropped.items():
            there = [stage for stage in own.stages.values() if place < len(stage.accepted_at)]
            most = sorted(there, key=lambda stage: stage.accepted_at[place])[-1:]
            for part in (own.whole, *most):
                if place < len(part.accepted_at):
                    part.accepted_at[place] -= num
                    part.accepted -= num
        own.accepted_tokens = own.whole.accepted
        return own

    def add(self, feedback: Feedback) -> None:
        """Counts one step's verification."""
        drafted, accepted = feedback.num_draft.tolist(), feedback.num_accepted.tolist()
        self.request_steps += len(drafted)
        self.drafts += len(drafted) - drafted.count(0)
        self.drafted_tokens += sum(drafted)
        self.accepted_tokens += sum(accepted)
        self.whole.verified, self.whole.accepted = self.drafted_tokens, self.accepted_tokens
        for num, requests in Tally(accepted).items():
            for position in range(num):
                count(self.whole.accepted_at, position, requests)

    def add_drafts(self, num_asked: int, num_draft: Int32Array) -> None:
        """Counts one step's drafts: requests that wanted one, and the length [num_reqs] that each got."""
        lengths = num_draft.tolist()
        self.whole.asked += num_asked
        self.whole.drafts += len(lengths) - lengths.count(0)
        self.whole.drafted += sum(lengths)
        self.whole.kept = self.whole.drafted
        for length, requests in Tally(lengths).items():
            count(self.draft_lengths, length, requests)

    def add_forced(self, feedback: Feedback, forced: Forced, stage: StageCounters) -> None:
        """Counts one step's verification where a grammar goes on after drafts, once `add` has.

        Args:
            forced: by request, how many tokens of its draft come before those that the grammar forced.
            stage: the grammar's, or `whole` where it is alone.
        """
        fates = zip(feedback.request_ids, feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)
        for request_id, num_draft, num_accepted in fates:
            count(self.draft_lengths, num_draft)
            start, _ = forced.get(request_id, (num_draft, ()))
            stage.drafts += num_draft > start
            stage.drafted += max(0, num_draft - start)
            if stage is not self.whole:
                stage.verified = stage.drafted
                stage.accepted += max(0, num_accepted - start)
                for position in range(start, num_accepted):
                    count(stage.accepted_at, position)
        stage.kept = stage.drafted


def faults_of(stats: Mapping[str, Any]) -> dict[str, int]:
    """Faults by kind of a method and of its stages, from Counters as a dictionary.

    >>> faults_of({"faults": {"raised": 1}, "stages": {"0 custom": {"faults": {"raised": 2}}}})
    {'raised': 3}
    """
    return dict(sum((Tally(stage["faults"]) for stage in stats["stages"].values()), Tally(stats["faults"])))


def count(totals: list[int], index: int, more: int = 1) -> None:
    """Adds to an entry of a list, which grows to have it.

    >>> totals = [1]
    >>> count(totals, 2)
    >>> totals
    [1, 0, 1]
    """
    if index >= len(totals):
        totals.extend([0] * (index + 1 - len(totals)))
    totals[index] += more
