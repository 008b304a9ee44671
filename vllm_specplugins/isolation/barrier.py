"""The fault barrier: adapters call a proposer through it and always get a valid draft, which is empty after a fault."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from vllm_specplugins.counters import Counters, Forced, Histogram, RequestRates, StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer
from vllm_specplugins.isolation.exchange import checked_draft, draft_of_rows, for_proposer
from vllm_specplugins.isolation.guard import NO_TEXTS, Guard, Texts

logger = logging.getLogger("vllm.specplugins")

LOG_EVERY_S = 10.0  # as vLLM logs its own statistics, while there is something to say


class FaultBarrier:
    """Calls a proposer through a guard, and counts its drafts. `time_budget_ms` limits one step, in a thread of the
    proposer; None calls it in the caller's thread without a limit (for proposers that run the target, and for cascades,
    which have guards for their stages). The tokens that the scheduler adds count for the stage with the index
    `forcing_stage`."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        max_num_draft: int,
        time_budget_ms: float | None,
        *,
        name: str = "The proposer",
        ends_process: bool = False,
        forcing_stage: int = 0,
    ):
        self.counters = Counters()
        self.rates: Any = RequestRates()
        self.emitted: tuple[int, dict[int, int]] | None = None  # counted by the scheduler; see engine/emitted.py
        self.tally: Any = None  # counts on the device; see engine/v2/feedback/tally.py
        self.budget: Any = None  # trims drafts on the device; see engine/adaptive/budget.py
        self.is_warming_up = False  # as our worker sets it: a request's name may be anything
        self.undrafted: str | None = None  # why the newest call drafted nothing
        self.forced: Forced | None = None  # tokens of this step that the scheduler adds after drafts
        self.when_loaded: Callable[[], None] = lambda: None  # our worker calls it once the target is loaded
        self.late: Any = None  # asks for late drafts; see engine/v2/speculators/late.py
        self.guard = Guard(
            proposer,
            name,
            self.counters,
            time_budget_ms,
            in_thread=time_budget_ms is not None,
            ends_process=ends_process,
        )
        self._forcing_stage = forcing_stage
        self._vocab_size = vocab_size
        self._max_num_draft = max_num_draft
        self._logged_at = time.monotonic()
        self.paused_ms = 0.0  # time of this step in which the engine stood still

    @property
    def proposer(self) -> Proposer:
        """The guarded proposer; an adapter that records a CUDA graph calls it directly."""
        return self.guard.proposer

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        """Counts the outcome of the last drafts and returns valid drafts for this step."""
        self.count(feedback)
        if batch.num_reqs == 0:
            return Draft.empty(0)
        if feedback.step_ms is not None:
            feedback = replace(feedback, step_ms=feedback.step_ms - self.paused_ms)
        self.paused_ms = 0.0
        self.guard.begin_step()
        start, activity = time.perf_counter(), self._activity()
        try:
            draft = self._propose(batch, feedback)
            self.undrafted = None if draft.num_draft.any() else self._reason(batch, activity)
            num_asked = int(np.count_nonzero(batch.max_num_draft))
            if self.forced is None:
                self.counters.add_drafts(num_asked, Histogram(draft.num_draft.tolist()))
            else:  # verification knows the length of the draft
                self.counters.whole.asked += num_asked
            return draft
        finally:
            self.counters.propose_ms += (time.perf_counter() - start) * 1000

    def _propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        may_draft, limits, proposer = self.guard.may_draft(batch.request_ids), batch.max_num_draft, self.proposer
        if may_draft is not None and not any(may_draft):
            return Draft.empty(batch.num_reqs)
        self.guard.observe(feedback if not self.forced else _without_forced(feedback, self.forced))
        sizes = self._max_num_draft, self._vocab_size
        rows = np.arange(batch.num_reqs) if may_draft is None else np.flatnonzero(may_draft)
        shown = self.guard.shown(batch, rows.tolist())
        if may_draft is None:
            given, runs_target = for_proposer(shown), batch.target is not None
            draft = self.guard.call(batch, lambda: checked_draft(proposer.propose(given), limits, *sizes, runs_target))
        else:
            draft = self.guard.call(batch, lambda: draft_of_rows(proposer, shown, rows, limits, *sizes))
        return Draft.empty(batch.num_reqs) if draft is None else draft

    def _activity(self) -> tuple[int, int]:
        """A cascade's running counts of questions to stages, and of drafts or questions that its gate withheld."""
        activity: tuple[int, int] = getattr(self.proposer, "activity", lambda: (-1, -1))()
        return activity

    def _reason(self, batch: DraftBatch, before: tuple[int, int]) -> str:
        """Why a call drafted nothing, where `before` was the activity."""
        if not batch.max_num_draft.any():
            return "limits"
        if self.counters.switched_off:
            return "faults"
        asked, withheld = self._activity()
        return "gate" if asked >= 0 and (asked == before[0] or withheld > before[1]) else "no draft"

    def count(self, feedback: Feedback, num_asked: int = 0) -> None:
        """Counts the verification of one step, including requests for which only the scheduler drafts."""
        self.counters.add(feedback)
        if self.forced is not None:
            self.counters.add_forced(feedback, self.forced, self._forcing)
            self._forcing.asked += num_asked
        self.rates.add(feedback)

    @cached_property
    def _forcing(self) -> StageCounters:
        stages: list[StageCounters] = list(getattr(self.proposer, "stage_counters", dict)().values())
        return stages[self._forcing_stage] if stages else self.counters.whole

    def log(self) -> None:
        """Logs the totals every LOG_EVERY_S seconds; adapters call it in every step."""
        now = time.monotonic()
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            with suppress(Exception):  # a filter that a proposer has installed may raise
                logger.info("Speculation so far: %s", self.net_totals().summary())

    def totals(self) -> Counters:
        self.counters.stages = getattr(self.proposer, "stage_counters", dict)()
        if self.tally is not None:
            self.tally.move_to(self.counters, list(self.counters.stages.values()))
        return self.counters

    def net_totals(self) -> Counters:
        """The totals without the draft tokens after a request's end, if one of our schedulers counts them."""
        return self.totals() if self.emitted is None else self.totals().net(*self.emitted)

    def forget(self, request_ids: Sequence[str], texts: Texts = NO_TEXTS) -> None:
        self.guard.forget(request_ids, texts)

    def settle(self) -> None:
        """Makes the proposer and a cascade's stages forget ended requests now, since no step will follow for a
        while."""
        if self.late is not None:
            self.late.settle()
        self.guard.settle()
        getattr(self.proposer, "settle_stages", lambda: None)()


def _without_forced(feedback: Feedback, forced: Forced) -> Feedback:
    """Removes forced tokens: they do not belong to the proposer's draft."""
    numbers = feedback.num_draft, feedback.num_accepted
    starts = [
        forced[id_][0] if id_ in forced else num for id_, num in zip(feedback.request_ids, numbers[0], strict=True)
    ]
    num_draft, num_accepted = (np.minimum(num, np.array(starts, np.int32)) for num in numbers)
    num_forced = int((numbers[0] - num_draft).sum()), int((numbers[1] - num_accepted).sum())
    return replace(feedback, num_draft=num_draft, num_accepted=num_accepted, num_forced=num_forced)
