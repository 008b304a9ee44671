"""Chooses the number of tokens to draft for each request, and the stage that drafts them, so that speculation does not
lose. A draft token gains its acceptance probability, and costs time in which the engine could emit other tokens. The
gate therefore drafts the k-th token while

    p_1 ... p_k >= rate * (MARGIN * ms to verify one more token + its share of the ms to draft it)

where p_i is the probability that token i is accepted if the tokens before it are (kernels/acceptance), and rate is the
best rate of tokens per ms of a step with the first drafts, or that of recent steps if it is better (best_rate.py).
Times depend on batch size and context (load_costs.py), and begin with a profile that the engine measures at its start
(profile.py). All requests share one price, at which the step verifies the tokens with the largest common gain. Of two
stages, the one with the larger gain drafts. From time to time the gate tries a draft that it does not expect to pay
off. The caller measures all times. R: requests of a step, K: max draft tokens.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.gate.draft_tracker import DraftTracker, rated
from vllm_specplugins.gate.drafter_length import paying_length
from vllm_specplugins.gate.load_costs import LoadCosts, StepCosts
from vllm_specplugins.gate.profile import StepProfile
from vllm_specplugins.gate.trials import EXPLORE_SHARE, GOOD_ACCEPTANCE, Trials
from vllm_specplugins.gate.usual import FEW, UsualMs
from vllm_specplugins.kernels.acceptance import Drafts
from vllm_specplugins.kernels.acceptance.host import DraftsType, Ints, Reals, StateType, accept_prob
from vllm_specplugins.kernels.compiled import compiled, inlined
from vllm_specplugins.structures.arrays import Floats
from vllm_specplugins.structures.arrays import Ints as IntArray
from vllm_specplugins.structures.drafts import FIRST_CONFIDENCE, DraftArrays

MAX_CREDIT = 32.0  # calls in a row that a stage on the host may lose, after which the gate calls it less often
ASK_EVERY = 64  # fewest steps between two of these calls
CUTS, STARTS, POLLS, PASSES = range(4)  # kinds of trials of a stage


@dataclass(slots=True)
class StageRecord:
    token: UsualMs = field(default_factory=UsualMs)  # time to draft one token for each request of the batch
    answer: UsualMs = field(default_factory=UsualMs)  # of a stage on the host
    num_accepted: int = 0  # its tokens that were accepted until the gate decided last
    credit: float = MAX_CREDIT  # calls that its accepted tokens have paid for


class Gate:
    def __init__(self, tracker: DraftTracker, max_num_draft: int):
        self._tracker = tracker
        self._max_num_draft = max_num_draft
        self.num_context = 0  # tokens of all requests of this step together
        self._costs = LoadCosts()
        self.counted_ms = self._costs.counted_ms
        self._sizes: set[int] = set()  # of batches so far
        self._stages = defaultdict[int, StageRecord](StageRecord)
        self._trials = Trials()  # by stage and kind

    def use_profile(self, ms: Mapping[int, float]) -> None:
        """Uses the times of steps by number of tokens that the engine measured at its start, if there are any."""
        self._costs.profile = StepProfile(ms) if ms else None

    def add_step(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        size = num_reqs.bit_length()
        if size not in self._sizes:  # the first step of a batch size warms up caches and compilers
            self._sizes.add(size)
            return
        self._costs.add(num_reqs, self.num_context, ms, drafting_ms, num_draft, num_emitted)

    def add_drafting(self, stage: int, ms: float, num_tokens: int) -> None:
        """Adds the time of these tokens, or of an answer of a stage on the host."""
        record = self._stages[stage]
        if num_tokens or ms:
            (record.token if num_tokens else record.answer).add(ms / max(1, num_tokens))

    def split_draft(
        self,
        rows: IntArray,
        drafts: DraftArrays,
        stage: int,
        confidence: Floats,
        stage_limits: IntArray,
        all_limits: IntArray,
        continues: bool,
    ) -> tuple[IntArray, IntArray]:
        """Returns, [R] each, the number of tokens of each draft to keep, and the number that another stage drafts after
        them. It compares all combinations of a prefix of the draft that pays off, from none to all of it, with tokens
        of the stage that pay off. The stage drafts to the same depth for all requests.

        Args:
            confidence: [R, K], confidence in the stage's tokens: probabilities, or from 1 on the lengths of matches.
            stage_limits, all_limits: [R], limits of the stage's tokens, and of all.
            continues: whether the stage can continue a draft; otherwise it only begins drafts.
        """
        costs = self._costs.of(len(rows), self.num_context)
        if costs is None:
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        limits = all_limits if continues else np.zeros(len(rows), np.int64)
        keep, more = self._best_split(costs, rows, drafts, stage, confidence, stage_limits, limits)
        cut = np.where(keep + more == 0, drafts.num_draft, 0)
        keep = self._explored(keep, cut, costs, (stage, CUTS))
        rest = np.where(keep == 0, all_limits, np.maximum(0, limits - keep))
        return keep, self._explored(more, np.minimum(stage_limits, rest), costs, (stage, STARTS))

    def profitable_length(self, rows: IntArray, drafts: DraftArrays) -> IntArray:
        """Returns the number of tokens of each draft that pay off, [R]."""
        costs, none = self._costs.of(len(rows), self.num_context), np.zeros(len(rows), np.int64)
        return none if costs is None else self._best_split(costs, rows, drafts, 0, drafts.confidence, none, none)[0]

    def _best_split(
        self,
        costs: StepCosts,
        rows: IntArray,
        drafts: DraftArrays,
        stage: int,
        confidence: Floats,
        stage_limits: IntArray,
        limits: IntArray,
    ) -> tuple[IntArray, IntArray]:
        first, of_stage = rated(drafts), np.full(confidence.shape, stage)
        others = Drafts(stage_limits, of_stage, np.ascontiguousarray(confidence))
        rate, price = self._price(costs, rows, first, others)
        draft_price = rate * self._stages[stage].token.ms
        tokens = first, stage, others.confidence, stage_limits, limits
        tracker, costs_of = self._tracker, (price, draft_price, self._tracker.continued(stage))
        keep, more = _split(rows, *tokens, *costs_of, tracker.state, tracker.whole)
        return keep, more

    def offer_length(
        self, rows: IntArray, drafts: DraftArrays, stage: int, stage_limits: IntArray, longest: int, saved_ms: float
    ) -> int:
        """Returns the number of tokens of a stage that runs for all requests at once, before its draft is known
        (paying_length). A length gains the tokens that it is expected to add to the given drafts. The passes after the
        first one take `saved_ms` for all `longest`. The stage drafts all tokens while few of its tokens were tried.
        `stage_limits` [R] limits its tokens."""
        costs = self._costs.of(len(rows), self.num_context)
        if costs is None or not self._tracker.has_tried(stage):
            return longest
        confidence = np.tile(FIRST_CONFIDENCE + np.arange(self._max_num_draft), (len(rows), 1))
        others = Drafts(stage_limits, np.full(confidence.shape, stage), confidence)
        _, price = self._price(costs, rows, rated(drafts), others)
        tokens = rated(drafts), stage, stage_limits, price, self._tracker.continued(stage)
        gains = _gains_by_length(rows, *tokens, self._tracker.state, longest)
        # Recent steps stand for one with the shortest length; the exact tokens and time of such a step play the same.
        best = paying_length(costs.mean_emitted + gains, costs.step_ms, saved_ms, self._trials, (stage, PASSES))
        return longest + 1 - len(gains) + best if best else 0

    def _price(self, costs: StepCosts, rows: IntArray, drafts: Drafts, others: Drafts) -> tuple[float, float]:
        """Returns the tokens that a ms is worth, by `drafts`, and the price in tokens of one more draft token, by the
        better of both drafts of each request."""
        best = survivals = self._tracker.survivals(rows, drafts)
        rate = costs.best_rate(len(rows), survivals.ravel())
        if others.num_draft.any():
            other = self._tracker.survivals(rows, others)
            best = np.where(survivals.sum(axis=1, keepdims=True) < other.sum(axis=1, keepdims=True), other, survivals)
        return rate, costs.price(rate, len(rows), best.ravel())

    def asks(self, stage: int, num_reqs: int) -> bool:
        """Returns whether to call a stage on the host. A call costs the tokens that the engine emits in its time, and
        the stage's accepted tokens pay for calls. A stage without credit is called only as often as ASK_EVERY and
        EXPLORE_SHARE allow. All ranks call this method, since it also decides on their trials."""
        record, costs = self._stages[stage], self._costs.of(num_reqs, self.num_context)
        num_accepted = self._tracker.num_accepted(stage)
        gained, record.num_accepted = num_accepted - record.num_accepted, num_accepted
        if costs is None or record.answer.ms < EXPLORE_SHARE * costs.step_ms:
            return True
        paid = gained / (costs.tokens_per_ms * record.answer.ms)
        record.credit = min(record.credit + paid, MAX_CREDIT)
        if record.credit >= 1:
            self._trials.restart((stage, POLLS))
        elif quiet := self._trials.due((stage, POLLS), record.answer.ms, costs.step_ms, ASK_EVERY):
            self._trials.add((stage, CUTS), quiet - 1)
        else:
            return False
        record.credit = max(0.0, record.credit - 1)
        return True

    def _explored(self, lengths: IntArray, limits: IntArray, costs: StepCosts, trial: tuple[int, int]) -> IntArray:
        """Returns the lengths; in a trial, requests that may have tokens and would get none get one token."""
        is_without = (lengths == 0) & (limits > 0)
        num_without = int(np.count_nonzero(is_without))
        if not num_without:
            return lengths
        token = self._stages[trial[0]].token if trial[1] == STARTS else UsualMs()
        trial_ms = costs.more_ms(num_without) + token.ms
        is_known = not 0 < token.num_calls < FEW
        if not self._trials.due(trial, is_known * trial_ms, costs.step_ms):
            return lengths
        return np.where(lengths > 0, lengths, np.minimum(1, limits))


_Gains = types.float64[::1]


@inlined
def _gains(
    row: int,
    index: int,
    drafts: Any,
    stage: int,
    confidence: Any,  # [K]
    stage_limit: int,
    limit: int,
    price: float,
    continued: float,
    state: Any,
    alone: Any,  # [K + 1], written
    after: Any,  # [K + 1], written
) -> int:
    """Returns the number of tokens of a request's draft that pay off. It writes to `alone` the gain of each number of
    the stage's tokens, and to `after` their gain together with the draft before them."""
    survival, gain, length = 1.0, 0.0, 0
    while length < drafts.num_draft[index]:
        prob = accept_prob(state, row, drafts.stage[index, length], drafts.confidence[index, length])
        if survival * prob < price:
            break
        survival *= prob
        gain += survival - price
        length += 1
    stage_survival = 1.0
    alone[0], after[0] = 0.0, gain
    for place in range(len(alone) - 1):
        alone[place + 1], after[place + 1] = alone[place], after[place]
        if place < stage_limit:
            stage_survival *= accept_prob(state, row, stage, confidence[place])
            alone[place + 1] += max(0.0, stage_survival - price)
            if place + 1 == stage_limit < len(alone) - 1:
                alone[place + 1] += stage_survival * continued
            if place < limit - length:
                after[place + 1] += max(0.0, survival * stage_survival - price)
    return length


@compiled(_Gains(Ints, DraftsType, types.int64, Ints, types.float64, types.float64, StateType, types.int64))
def _gains_by_length(
    rows: Any, drafts: Any, stage: int, stage_limits: Any, price: float, continued: float, state: Any, longest: int
) -> Any:
    """Returns the tokens that a stage is expected to gain beyond the drafts, for all requests, before it drafts: 0 for
    no token, and then the gain of each length from 2 on, or from 1 if K is 1."""
    K = drafts.confidence.shape[1]
    first, (alone, after) = min(2, longest), np.empty((2, K + 1))
    confidence, gains = FIRST_CONFIDENCE + np.arange(K), np.zeros(longest + 2 - first)
    for index in range(len(rows)):
        for length in range(first, longest + 1):
            limit = min(length, stage_limits[index])
            _gains(rows[index], index, drafts, stage, confidence, limit, 0, price, continued, state, alone, after)
            gains[length + 1 - first] += max(0.0, alone[-1] - after[0])
    return gains


@compiled(
    types.UniTuple(Ints, 2)(
        *(Ints, DraftsType, types.int64, Reals, Ints, Ints),
        *(types.float64, types.float64, types.float64, StateType, Reals),
    )
)
def _split(
    rows: Any,
    drafts: Any,
    stage: int,
    confidence: Any,  # [R, K], of the stage
    stage_limits: Any,  # [R]
    limits: Any,  # [R], length up to which the stage may continue drafts, 0 if it only begins drafts
    price: float,  # of verifying one more token, in tokens
    draft_price: float,  # price of drafting one more token of the stage for all
    continued: float,  # mean accepted lookup tokens after a wholly accepted draft of the stage
    state: Any,
    whole: Any,
) -> Any:
    num_reqs, K = confidence.shape
    keep, more, lengths = np.zeros(num_reqs, np.int64), np.zeros(num_reqs, np.int64), np.empty(num_reqs, np.int64)
    alone, after, gains = np.empty((num_reqs, K + 1)), np.empty((num_reqs, K + 1)), np.zeros(K + 1)
    for index in range(num_reqs):
        lengths[index] = _gains(
            rows[index], index, drafts, stage, confidence[index], stage_limits[index], limits[index], price, continued,
            state, alone[index], after[index],
        )  # fmt: skip
        gains += np.maximum(alone[index], after[index])
    depth = 0
    for other in range(1, K + 1):
        if gains[other] - other * draft_price > gains[depth] - depth * draft_price:
            depth = other
    num_following = 0
    for index in range(num_reqs):
        row, is_alone = rows[index], alone[index, depth] > after[index, depth]
        gained = alone[index] if is_alone else after[index]
        while more[index] < depth and gained[more[index] + 1] > gained[more[index]]:
            more[index] += 1
        keep[index] = 0 if is_alone else lengths[index]
        # A wholly accepted draft is followed by a draft twice as long, against any record, since text changes.
        if keep[index] + more[index] == 0:
            if price < GOOD_ACCEPTANCE:
                keep[index] = min(2 * int(whole[row, drafts.stage[index, 0]]), drafts.num_draft[index])
            num_following += keep[index] == 0 and whole[row, stage] > 0 and stage_limits[index] > 0
    if num_following * (GOOD_ACCEPTANCE - price) > draft_price:
        for index in range(num_reqs):
            if keep[index] + more[index] == 0:
                more[index] = min(2 * int(whole[rows[index], stage]), stage_limits[index])
    return keep, more
