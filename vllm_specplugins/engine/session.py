"""Stores the state of a worker's drafting: counts, the scheduler's message, and parts of the speculator that other
modules use."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from vllm_specplugins.counters import Counters, RequestRates, StageCounters, count
from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.messages import Emitted, Forced, StepFacts, StepNews
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.stage import stage_of
from vllm_specplugins.structures.arrays import Floats

logger = logging.getLogger("vllm.specplugins")

LOG_EVERY_S = 10.0  # the interval at which vLLM logs its statistics


class Rates(Protocol):
    def add(self, feedback: Feedback) -> None: ...
    def take(self, request_ids: Sequence[str]) -> list[float]: ...


class DeviceCounts(Protocol):
    def move_to(self, counters: Counters, stages: Sequence[StageCounters]) -> None: ...


class Trims(Protocol):
    num_verified: int

    def costs(self) -> Mapping[str, float]: ...
    def drafter_length(self, reports: Floats, lengths: Sequence[int], num_passes: int) -> int: ...


class Settles(Protocol):
    def settle(self) -> None: ...


@dataclass(eq=False)
class Session:
    """The object through which adapters call the proposer; it also counts drafts and accepted tokens."""

    barrier: FaultBarrier
    scheduler_stage: int | None = None  # index of the stage for which the scheduler's tokens count; None: it adds none
    rates: Rates = field(default_factory=RequestRates)  # acceptance rates by request
    tally: DeviceCounts | None = None
    budget: Trims | None = None  # trims drafts on the device
    late: Settles | None = None  # drafts in a thread
    emitted: Emitted | None = None
    facts: StepFacts = field(default_factory=StepFacts)  # of this step
    forced: Forced | None = None  # tokens of this step that the scheduler adds after drafts
    refused: Sequence[str] = ()  # as in StepNews, of this step
    is_warming_up: bool = False  # then a request may have any name
    undrafted: str | None = None  # why the newest call drafted nothing
    paused_ms: float = 0.0  # time of this step in which the engine was paused
    when_loaded: Callable[[], None] = lambda: None  # called once the target is loaded
    _logged_at: float = field(default_factory=time.monotonic)

    def read(self, news: StepNews) -> None:
        """Reads the message that the scheduler sends with a step."""
        self.emitted = news.emitted or self.emitted  # vLLM's warm-up has no message
        self.refused = news.refused
        if self.scheduler_stage is not None:
            self.forced = {draft.request_id: (draft.num_before, draft.token_ids) for draft in news.forced}

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        """Counts the outcome of the last drafts and returns valid drafts for this step."""
        self.count(feedback)
        if batch.num_reqs == 0:
            return Draft.empty(0)
        if feedback.step_ms is not None:
            feedback = replace(feedback, step_ms=feedback.step_ms - self.paused_ms)
        self.paused_ms = 0.0
        if self.refused:
            refused = [request_id in self.refused for request_id in feedback.request_ids]
            feedback = replace(feedback, num_refused=np.array(refused, np.int32))
        before = stage_of(self.barrier.proposer).activity()
        draft = self.barrier.draft(batch, _without_forced(feedback, self.forced) if self.forced else feedback)
        self.undrafted = None if draft.num_draft.any() else self._reason(batch, before)
        if self.forced is None:
            self.barrier.count_drafts(batch, draft)
        else:  # verification knows the draft's length
            self.barrier.counters.whole.asked += int(np.count_nonzero(batch.max_num_draft))
        return draft

    def _reason(self, batch: DraftBatch, before: tuple[int, int] | None) -> str:
        """Returns why a call drafted nothing; `before` is the earlier activity."""
        if not batch.max_num_draft.any():
            return "limits"
        if self.barrier.counters.switched_off:
            return "faults"
        after = stage_of(self.barrier.proposer).activity()
        chose = before is not None and after is not None and (after[0] == before[0] or after[1] > before[1])
        return "gate" if chose else "no draft"

    def count(self, feedback: Feedback, num_asked: int = 0) -> None:
        """Counts the verified drafts of a step, including those that only the scheduler made."""
        self.barrier.counters.add(feedback)
        if self.forced is not None:
            self._count_forced(feedback, self.forced)
            self._forcing.asked += num_asked
        self.rates.add(feedback)

    @cached_property
    def _forcing(self) -> StageCounters:
        counters = self.barrier.totals()
        return list(counters.stages.values())[self.scheduler_stage or 0] if counters.stages else counters.whole

    def _count_forced(self, feedback: Feedback, forced: Forced) -> None:
        """Counts the verification of the scheduler's tokens after drafts in one step; the caller calls `add` first."""
        counters, stage = self.barrier.counters, self._forcing
        fates = zip(feedback.request_ids, feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)
        for request_id, num_draft, num_accepted in fates:
            count(counters.draft_lengths, num_draft)
            start, _ = forced.get(request_id, (num_draft, ()))
            stage.drafts += num_draft > start
            stage.drafted += max(0, num_draft - start)
            if stage is not counters.whole:
                stage.verified = stage.drafted
                stage.accepted += max(0, num_accepted - start)
                for position in range(start, num_accepted):
                    count(stage.accepted_at, position)
        stage.kept = stage.drafted

    def log(self) -> None:
        """Logs the totals every LOG_EVERY_S seconds; adapters call it in every step."""
        now = time.monotonic()
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            with suppress(Exception):  # a filter that a proposer has installed may raise
                logger.info("Speculation so far: %s", self.net_totals().summary())

    def totals(self) -> Counters:
        counters = self.barrier.totals()
        if self.tally is not None:
            self.tally.move_to(counters, list(counters.stages.values()))
        return counters

    def net_totals(self) -> Counters:
        """Returns the totals without draft tokens after a request's end, if a scheduler of the plugin counts them."""
        return self.totals() if self.emitted is None else self.totals().net(*self.emitted)

    def settle(self) -> None:
        """Makes the proposer and a cascade's stages forget ended requests now, since no step may follow for a while."""
        if self.late is not None:
            self.late.settle()
        self.barrier.settle()


def _without_forced(feedback: Feedback, forced: Forced) -> Feedback:
    """Removes forced tokens: they do not belong to the proposer's draft."""
    numbers = feedback.num_draft, feedback.num_accepted
    starts = [
        forced[id_][0] if id_ in forced else num for id_, num in zip(feedback.request_ids, numbers[0], strict=True)
    ]
    num_draft, num_accepted = (np.minimum(num, np.array(starts, np.int32)) for num in numbers)
    num_others = int((numbers[0] - num_draft).sum()), int((numbers[1] - num_accepted).sum())
    return replace(feedback, num_draft=num_draft, num_accepted=num_accepted, num_others=num_others)
