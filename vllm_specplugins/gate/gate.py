"""The gate: how many tokens a request gets drafted, and by whom, so that speculation does not lose.

A token more brings its probability of being accepted, and costs the time in which the engine could have emitted others:
draft the k-th token while a_1 ... a_k >= rate * (cost of verifying one more token + its share of the cost of drafting
it), where a_i is the probability that token i is accepted after the ones before it were, and rate the tokens per ms
that the engine emits now (Dinkelbach's method for a ratio, one iteration a step), or more among several requests. The
a_i are from the ledger (ledger.py), the costs by batch size and context (costs.py); a batch size that is new starts
without drafts, then with short ones. Of two stages the one with the larger gain drafts.
Pure arithmetic: times come in, nothing is measured here.
"""

from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.gate.costs import LoadCosts, StepCosts, break_even_rate
from vllm_specplugins.gate.ledger import Ledger, accept_prob, drafts_type, ints, reals, records_type
from vllm_specplugins.gate.step_times import OUTLIER_RATIO
from vllm_specplugins.kernels.compiled import compiled, inlined
from vllm_specplugins.structures.arrays import FIRST_CONFIDENCE, DraftArrays, Floats, Ints

EXPLORE_EVERY = 12  # steps without a draft after which a stage that does not pay is tried again, at the earliest
FEW_CALLS = 10  # of a stage, after which its time is known
MIN_CALLS = 3  # of a stage, before which its time may be that of a hiccup, and trials may cost anything
EMPTY_ANSWERS = 8  # in a row, after which a stage on the host is asked but now and then
EXPLORE_SHARE = 0.01  # of the time is spent on such trials, at the most
GOOD_ACCEPTANCE = 0.75  # what text that suits a stage may be expected to have, whatever the record of other text
RUN_MARGIN = 2.0  # a stage that runs may bring so many times what is expected: a lookup continues its tokens, too
# By stage: trials of what there is in front of it, of asking it, and steps in a row that it was spared.
FOUND, ASKED, SPARED = 1 << 8, 1 << 9, 1 << 10


class Gate:
    """Chooses draft lengths, and between stages.

    R: requests of a step, K: most tokens of a draft.
    """

    def __init__(self, ledger: Ledger, max_num_draft: int):
        self._ledger = ledger
        self._max_num_draft = max_num_draft
        self.num_context = 0  # tokens of all requests of this step, together
        self._costs = LoadCosts()
        self._sizes: set[int] = set()  # of batches that there have been
        self._draft_ms: dict[int, float] = {}  # by stage, a token of the whole batch
        self._draft_calls: dict[int, int] = {}
        self._kept: dict[int, tuple[int, int]] = {}  # by stage, tokens kept in all when last asked; in vain since then
        self._drafted: set[int] = set()  # stages
        self._quiet: dict[int, int] = {}  # by stage, steps in which somebody went without and nobody was tried

    def add_step(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """A step of nothing but decoding is over. See StepCosts.add."""
        size = num_reqs.bit_length()
        if size not in self._sizes:  # the first step of a size warms up caches and compilers
            self._sizes.add(size)
            return
        self._costs.add(num_reqs, self.num_context, ms, drafting_ms, num_draft, num_emitted)

    def add_drafting(self, stage: int, ms: float, num_tokens: int) -> None:
        """What a stage took to draft so many tokens for each request of the batch, all at once."""
        if num_tokens == 0:
            return
        if stage not in self._drafted:  # the first time warms up caches and compilers
            self._drafted.add(stage)
            return
        token_ms = ms / num_tokens
        old = self._draft_ms.get(stage, token_ms)
        is_quicker = token_ms * OUTLIER_RATIO < old  # what was learned was of hiccups
        calls = self._draft_calls[stage] = 1 if is_quicker else self._draft_calls.get(stage, 0) + 1
        self._draft_ms[stage] = old + max(1 / FEW_CALLS, 1 / calls) * (min(token_ms, OUTLIER_RATIO * old) - old)

    def split_draft(
        self,
        rows: Ints,
        found: DraftArrays,
        stage: int,
        confidence: Floats,
        max_own: Ints,
        max_draft: Ints,
        continues: bool,
    ) -> tuple[Ints, Ints]:
        """[R] each: how many tokens of the drafts that there are to keep, and how many to draft after them from another
        stage, which may continue such drafts or only begin some.

        Of none, some, or all of a draft that pays, and as many of the stage's tokens as pay, what gains most; the
        stage's tokens are as many for one request as for all that want them.

        Args:
            rows: [R], of the requests.
            confidence: [R, K], of the stage's tokens: probabilities, or from 1 on matches' lengths.
            max_own, max_draft: [R], of the stage's tokens, and of all.
        """
        costs = self._costs.of(len(rows), self.num_context)
        if costs is None:
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        room = max_draft if continues else np.zeros(len(rows), np.int64)
        kept, own = self._split_draft(costs, rows, found, stage, confidence, max_own, room)
        kept = self._explored(kept, stage + FOUND, np.where(kept + own == 0, found.num_draft, 0), costs)
        rest = np.where(kept == 0, max_draft, np.maximum(0, room - kept))
        return kept, self._explored(own, stage, np.minimum(max_own, rest), costs)

    def _split_draft(
        self,
        costs: StepCosts,
        rows: Ints,
        found: DraftArrays,
        stage: int,
        confidence: Floats,
        max_own: Ints,
        room: Ints,
    ) -> tuple[Ints, Ints]:
        kept, own = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        rate = break_even_rate(costs, len(rows))
        prices = rate * self._tokens_ms(costs, len(rows)), rate * self._draft_ms.get(stage, 0.0)
        drafts = found.num_draft, np.ascontiguousarray(found.stage), np.ascontiguousarray(found.confidence)
        limits = np.ascontiguousarray(confidence), max_own, room
        max_length = costs.max_length(is_free=not self._drafted)
        _share(kept, own, rows, drafts, stage, *limits, prices, max_length, self._ledger.records)
        return kept, own

    def profitable_length(self, rows: Ints, drafts: DraftArrays) -> Ints:
        """[R]: how many tokens of drafts that there are pay."""
        costs, none = self._costs.of(len(rows), self.num_context), np.zeros(len(rows), np.int64)
        if costs is None:
            return none
        return self._split_draft(costs, rows, drafts, 0, drafts.confidence, none, none)[0]

    def spares(self, rows: Ints, found: DraftArrays, stage: int, max_own: Ints, saved_ms: float) -> bool:
        """Whether a step does without a stage that runs for all requests at once, before it is known whose draft is
        taken. Its drafts are then expected to gain too little beside those that there are: RUN_MARGIN times that is
        less than the engine emits in the time of a run. The stage runs as long as few of its tokens have been tried,
        and once in so many steps that this takes EXPLORE_SHARE of the time.

        Args:
            max_own: [R], tokens that the stage may draft.
            saved_ms: time of a run.
        """
        costs = self._costs.of(len(rows), self.num_context)
        if costs is None or not self._ledger.has_tried(stage):
            return False
        rate = break_even_rate(costs, len(rows))
        drafts = found.num_draft, np.ascontiguousarray(found.stage), np.ascontiguousarray(found.confidence)
        gain = _gain(rows, drafts, stage, max_own, rate * self._tokens_ms(costs, len(rows)), self._ledger.records)
        quiet = self._quiet.get(stage + SPARED, 0) + 1
        most_quiet = max(EXPLORE_EVERY, saved_ms / costs.step_ms / EXPLORE_SHARE)
        is_spared = RUN_MARGIN * gain <= costs.tokens_per_ms * saved_ms and quiet <= most_quiet
        self._quiet[stage + SPARED] = quiet if is_spared else 0
        return is_spared

    def _tokens_ms(self, costs: StepCosts, num_reqs: int) -> Floats:
        """[K], the price in ms of each token more of a draft."""
        K = self._max_num_draft
        return costs.tokens_ms(K) if num_reqs == 1 else np.full(K, costs.slope_ms)

    def asks(self, stage: int, num_reqs: int, ms: float) -> bool:
        """Whether to ask a stage on the host, which takes so long. One that brought nothing EMPTY_ANSWERS times in a
        row is asked as often as EXPLORE_SHARE allows."""
        kept, costs = self._ledger.num_kept(stage), self._costs.of(num_reqs, self.num_context)
        before, num_empty = self._kept.get(stage, (kept, 0))
        num_empty *= kept == before
        quiet = self._quiet[stage + ASKED] = self._quiet.get(stage + ASKED, 0) + 1
        if costs is not None and num_empty >= EMPTY_ANSWERS and quiet < ms / costs.step_ms / EXPLORE_SHARE:
            return False
        self._kept[stage], self._quiet[stage + ASKED] = (kept, num_empty + 1), 0
        self._quiet[stage + FOUND] = self._quiet.get(stage + FOUND, 0) + quiet - 1
        return True

    def _explored(self, lengths: Ints, stage: int, max_own: Ints, costs: StepCosts) -> Ints:
        """Now and then one token for those who may have some and would get none, as often as EXPLORE_SHARE allows."""
        without = int(np.count_nonzero(max_own[lengths == 0] > 0))
        if not without:
            return lengths
        quiet = self._quiet[stage] = self._quiet.get(stage, 0) + 1
        trial_ms = without * costs.slope_ms + self._draft_ms.get(stage, 0.0)
        is_known = self._draft_calls.get(stage, MIN_CALLS) >= MIN_CALLS
        if quiet < max(EXPLORE_EVERY, is_known * trial_ms / costs.step_ms / EXPLORE_SHARE):
            return lengths
        self._quiet[stage] = 0
        return np.where(lengths > 0, lengths, np.minimum(1, max_own))


_prices_type = types.Tuple((types.float64[::1], types.float64))


@inlined
def _candidates(
    row: int,
    found: Any,
    index: int,
    stage: int,
    confidence: Any,
    max_own: int,
    room: int,
    prices: Any,
    records: Any,
    alone: Any,
    after: Any,
) -> int:
    """How many tokens of a request's draft [K] pay; into `alone` and `after` [K + 1], what so many tokens of another
    stage gain by themselves, and after that draft, with what it gains."""
    num_found, stages, found_confidence = found
    survival, gain, kept = 1.0, 0.0, 0
    while kept < num_found[index]:
        next_survival = survival * accept_prob(records, row, stages[index, kept], found_confidence[index, kept])
        if next_survival < prices[kept]:
            break
        gain += next_survival - prices[kept]
        survival, kept = next_survival, kept + 1
    own = 1.0
    alone[0], after[0] = 0.0, gain
    for place in range(len(alone) - 1):
        alone[place + 1], after[place + 1] = alone[place], after[place]
        if place < max_own:
            own *= accept_prob(records, row, stage, confidence[place])
            alone[place + 1] += max(0.0, own - prices[place])
            if place < room - kept:
                after[place + 1] += max(0.0, survival * own - prices[kept + place])
    return kept


@compiled(types.float64(ints, drafts_type, types.int64, ints, types.float64[::1], records_type))
def _gain(rows: Any, found: Any, stage: int, max_own: Any, prices: Any, records: Any) -> float:
    """Tokens that a stage is expected to bring all requests more than the drafts that there are. It has not drafted:
    the usual confidence stands for its tokens'."""
    alone, after = np.empty((2, found[1].shape[1] + 1))
    usual = FIRST_CONFIDENCE + np.arange(found[1].shape[1])
    gain = 0.0
    for index in range(len(rows)):
        _candidates(rows[index], found, index, stage, usual, max_own[index], 0, prices, records, alone, after)
        gain += max(0.0, alone[-1] - after[0])
    return gain


@compiled(
    types.void(
        *(ints, ints, ints, drafts_type, types.int64, reals, ints, ints),
        *(_prices_type, types.int64, records_type),
    )
)
def _share(
    kept: Any,
    own: Any,
    rows: Any,
    found: Any,
    stage: int,
    confidence: Any,
    max_own: Any,
    room: Any,
    prices: Any,
    max_length: int,
    records: Any,
) -> None:
    """See Gate.split_draft: into `kept` and `own`.

    Args:
        found: drafts that there are.
        confidence: [R, K], of the stage.
        room: [R], tokens up to which the stage may continue drafts; 0 where it only begins some.
        prices: of verifying each token of a draft [K], and of drafting one more of the stage for all, in tokens.
        max_length: of the drafts.
        records: of the ledger.
    """
    token_prices, draft_price = prices
    price = token_prices[0]
    whole = records[2]
    max_num_draft = found[1].shape[1]
    shape = len(rows), max_num_draft + 1
    all_alone, all_after, gains = np.empty(shape), np.empty(shape), np.zeros(max_num_draft + 1)
    lengths = np.empty_like(rows)
    for index in range(len(rows)):
        alone, after = all_alone[index], all_after[index]
        own_confidence, its_max, its_room = confidence[index], max_own[index], room[index]
        lengths[index] = _candidates(
            rows[index], found, index, stage, own_confidence, its_max, its_room, token_prices, records, alone, after
        )
        for depth in range(max_num_draft + 1):
            gains[depth] += max(alone[depth], after[depth])
    deepest = 0
    for depth in range(1, min(max_length, max_num_draft) + 1):
        if gains[depth] - depth * draft_price > gains[deepest] - deepest * draft_price:
            deepest = depth
    num_following = 0
    for index in range(len(rows)):
        row, alone, after = rows[index], all_alone[index], all_after[index]
        is_alone = alone[deepest] > after[deepest]
        gained = alone if is_alone else after
        more = 0
        while more < deepest and gained[more + 1] > gained[more]:
            more += 1
        kept[index], own[index] = 0 if is_alone else min(lengths[index], max_length), more
        # A draft that was accepted whole is followed by one twice as long, whatever the record says: text changes.
        if kept[index] + more == 0:
            if price < GOOD_ACCEPTANCE:
                kept[index] = min(2 * int(whole[row, found[1][index, 0]]), found[0][index])
            num_following += kept[index] == 0 and whole[row, stage] > 0 and max_own[index] > 0
    if num_following * (GOOD_ACCEPTANCE - price) > draft_price:
        for index in range(len(rows)):
            if kept[index] + own[index] == 0:
                own[index] = min(2 * int(whole[rows[index], stage]), max_own[index])
