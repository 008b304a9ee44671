"""Simulates Model Runner V2's choice of lengths with its classes. The scheduler chooses the number of tokens that a
step drafts for each request, from ended steps. One step later, the host chooses the number of draft tokens to verify,
from acceptance probabilities that are a step old, and the device takes the likeliest tokens. A lookup continues the
tokens of a recorded drafter, and the step verifies the draft with the larger gain. R: requests of a step, K: max draft
tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, Feedback, Int32Array
from vllm_specplugins.gate.budget import UNKNOWN, Prices, StepBudget
from vllm_specplugins.gate.common_length import CommonLength, fill_a_graph
from vllm_specplugins.gate.draft_tracker import DraftTracker, rated
from vllm_specplugins.gate.drafter_length import NEW_REPORT
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to
from vllm_specplugins.kernels.acceptance import PRIOR_WEIGHT
from vllm_specplugins.kernels.budget.host import share_budget
from vllm_specplugins.structures.arrays import Ints, SlotTable
from vllm_specplugins.structures.drafts import FIRST_CONFIDENCE, DraftArrays, better, join, of_stage
from vllm_specplugins.tools.replay.costs import Load
from vllm_specplugins.tools.replay.drafter import Drafter

More = Callable[[DraftArrays], DraftArrays]
BESIDE_PROMPTS = 1 - 1e-9  # share of a step with prompts, which are free here: its time does not count for its length


class DeviceLengths:
    """Chooses the lengths of drafts, and the drafts.

    Args:
        load: the load, with the costs of vLLM's profile at the start.
        clock: returns the simulated time in seconds.
    """

    def __init__(self, max_num_draft: int, load: Load, clock: Callable[[], float], drafter: Drafter | None):
        self._width, self._drafter, num_slots = max_num_draft, drafter, load.batch + 1
        self._chooser = CommonLength(StepTimes(lengths_up_to(max_num_draft), trims=True), clock)
        self._budget = StepBudget(num_slots, max_num_draft)
        self._tracker = DraftTracker(1 if drafter is None else 2, max_num_draft, PRIOR_WEIGHT)
        self._tracker.make_room(num_slots)
        self._slots, self._is_known = SlotTable(), np.zeros(num_slots, bool)
        # Of the newest drafts, and of the drafts before them.
        self._probs = np.full((2, num_slots, max_num_draft), UNKNOWN, np.float32)
        self._reports = np.zeros((2, num_slots, 2))  # reports for expected_gains, likewise
        self._verify_ms = np.array([load.costs.step_ms(0, num) for num in range(num_slots * (max_num_draft + 1))])
        self._prices = Prices(load.costs.context_ms)
        self._length = self._verifies = 0  # draft tokens of each request: drafted by this step, and verified
        self._ended: Any = None  # the last step, from which the scheduler learns
        self._step_ms = 0.0  # of this step without a drafter

    def admitted(self, num_running: int, decoding: Sequence[str], context: int) -> Ints:
        """Begins a step. Returns the number of draft tokens that it verifies for each decoding request, [R]; `context`
        is the sum of their tokens."""
        self._verifies, self._length = self._length, self._chooser[num_running]
        step_ms = self._chooser.step_ms()
        if self._ended is not None:
            num_reqs, verified, drafted, emitted, share = self._ended
            self._chooser.add(num_reqs, verified, drafted, step_ms, emitted, share)
        num_reqs, slots = len(decoding), self._slots.of(decoding)
        planned, mean_context = np.full(num_reqs, self._verifies), context / max(1, num_reqs)
        self._step_ms = self._prices.costs(0.0, self._verify_ms, num_reqs, mean_context).of(num_reqs, 0)
        if not planned.any():
            return planned
        draft_ms = 0.0 if self._drafter is None else self._drafter.step_ms(num_reqs, self._drafter.num_draft)
        costs = self._prices.costs(draft_ms, self._verify_ms, num_reqs, mean_context)
        total = int(planned.sum())
        read = lambda: (self._probs[1], slots, num_reqs)  # noqa: E731
        budget = self._budget.choose(costs, num_reqs, planned.tolist(), total, read)
        self._step_ms = costs.of(num_reqs, budget) - draft_ms
        return share_budget(self._probs[0], slots, planned, budget) if budget < total else planned

    def observe(self, feedback: Feedback) -> tuple[int, int]:
        """Learns from the step's outcome. Returns the number of tokens to look up for each request, and the number that
        the drafter drafts."""
        slots, num_accepted = self._slots.of(feedback.request_ids), feedback.num_accepted
        is_new = ~self._is_known[slots]
        share = 1.0
        if is_new.any():
            self._add(slots[is_new])
            share = BESIDE_PROMPTS
        emitted = (num_accepted[~is_new] + 1).tolist()
        self._ended = len(emitted), self._verifies, self._length, emitted, share
        self._tracker.observe(slots, feedback.num_draft, num_accepted)
        rests = self._drafter is None and not (self._length or self._verifies or share < 1)
        if rests:
            self._probs[:] = UNKNOWN
        return self._length, 0 if self._drafter is None else self._depth(self._drafter, slots)

    def _depth(self, drafter: Drafter, slots: Ints) -> int:
        """The pass over the verified tokens yields one token; each further token takes one more pass."""
        if min(drafter.num_draft, self._length) < 2:
            return min(drafter.num_draft, self._length)
        first_ms, all_ms = (drafter.step_ms(len(slots), length) for length in (1, drafter.num_draft))
        lengths = range(1, drafter.num_draft + 1)
        times = self._step_ms + first_ms, all_ms - first_ms
        return min(self._budget.drafter_length(self._reports[1, slots], lengths, *times), self._length)

    def _add(self, slots: Ints) -> None:
        self._tracker.clear(slots)
        self._is_known[slots], self._probs[:, slots], self._reports[:, slots] = True, UNKNOWN, NEW_REPORT
        for slot in slots.tolist():
            self._budget.clear(slot)

    def keep(
        self, request_ids: Sequence[str], draft: Draft, offered: Int32Array | None, more: More | None = None
    ) -> Draft:
        """Returns the step's drafts: tokens of a lookup, or tokens of the drafter, [R, any number], with `more` tokens
        of the lookup."""
        slots, num_reqs = self._slots.of(request_ids), len(request_ids)
        confidence = np.full(num_reqs, FIRST_CONFIDENCE) if draft.confidence is None else draft.confidence
        drafts = of_stage(0, self._padded(draft.token_ids), draft.num_draft, confidence)
        self._probs[1], self._reports[1] = self._probs[0], self._reports[0]
        if offered is not None and self._drafter is not None:
            num_offered = np.full(num_reqs, offered.shape[1])
            others = of_stage(1, self._padded(offered), num_offered, np.full(num_reqs, FIRST_CONFIDENCE))
            others = others if more is None else join(others, more(others))
            gains = self._gains(slots, drafts), self._gains(slots, others)
            self._reports[0, slots] = np.stack((gains[0], self._tracker.rates(slots, 1)), axis=1)
            drafts = better(drafts, others, gains)
        if self._length:
            self._probs[0, slots] = self._tracker.accept_probs(slots, rated(drafts))
        self._tracker.keep(slots, drafts)
        return Draft(drafts.token_ids, drafts.num_draft)

    def _gains(self, slots: Ints, drafts: DraftArrays) -> Any:
        return self._tracker.survivals(slots, rated(drafts)).sum(axis=1)

    def _padded(self, token_ids: Int32Array) -> Int32Array:
        padded = np.zeros((len(token_ids), self._width), np.int32)
        padded[:, : token_ids.shape[1]] = token_ids
        return padded

    def forget(self, request_ids: Sequence[str]) -> None:
        self._is_known[self._slots.forget(request_ids)] = False


class PlannedLengths(DeviceLengths):
    """The lengths of drafts without a gate and without trimming: the scheduler plans K tokens, or the length of the
    request's newest known draft, which is two steps old."""

    def __init__(self, max_num_draft: int, *arguments: Any):
        super().__init__(max_num_draft, *arguments)
        self._length, self._num_running = max_num_draft, 0
        self._drafted: dict[str, list[int]] = {}

    def admitted(self, num_running: int, decoding: Sequence[str], context: int) -> Ints:
        fills, self._num_running = fill_a_graph(self._num_running, self._width), num_running
        known = [self._drafted[name] for name in decoding]
        planned = [lengths[-3] if len(lengths) > 2 else self._width for lengths in known]
        return np.array([self._width if fills and any(planned) else length for length in planned], np.int64)

    def observe(self, feedback: Feedback) -> tuple[int, int]:
        return self._width, 0

    def keep(self, request_ids: Sequence[str], draft: Draft, offered: Int32Array | None, more: Any = None) -> Draft:
        for name, length in zip(request_ids, draft.num_draft.tolist(), strict=True):
            self._drafted[name] = [*self._drafted.get(name, [])[-2:], length]
        return draft

    def forget(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._drafted.pop(name, None)
