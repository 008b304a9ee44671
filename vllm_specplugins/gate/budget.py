"""Chooses the number of draft tokens that a step verifies, if the device trims drafts: the number with the best rate of
tokens per ms, from acceptance probabilities that are a step old and a table of step times. It also chooses how many
tokens a drafter drafts in addition to a lookup. S: slots of requests, R: requests of a step, K: max draft tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.gate.best_rate import best_number
from vllm_specplugins.gate.drafter_length import expected_gains, paying_length
from vllm_specplugins.gate.trials import GOOD_ACCEPTANCE, Trials
from vllm_specplugins.kernels.acceptance import DECAY, SHARED_DECAY
from vllm_specplugins.kernels.compiled import compiled
from vllm_specplugins.structures.arrays import Floats

FREE = 1.02  # drafts are free if a step with all of them takes at most this multiple of a step without drafts
POOR_SHARE = 0.5  # of a request's mean gain, below which a draft is poor; with 0, cascades lose 0.6 %, lookups nothing
UNKNOWN = 1.0  # acceptance probability of all tokens of a draft that the host does not know yet, as in vLLM's tables


class Costs(NamedTuple):
    """Milliseconds of a step: a constant part, a part by number of tokens, and an additional part per draft token."""

    step_ms: float
    verify_ms: Any
    token_ms: float = 0.0

    def of(self, num_fixed: int, num_draft: int) -> float:
        return float(self.step_ms + self.verify_ms[num_fixed + num_draft] + num_draft * self.token_ms)


class Prices(NamedTuple):
    """Milliseconds per token of context, for a request and for a draft token."""

    read_ms: float = 0.0
    attend_ms: float = 0.0

    def costs(self, draft_ms: float, verify_ms: Any, num_reqs: int, context: float) -> Costs:
        """Returns the costs of a step, from tables without context and the requests' mean context."""
        return Costs(draft_ms + self.read_ms * num_reqs * context, verify_ms, self.attend_ms * context)


class StepBudget:
    """Chooses for consecutive steps, and stores by slot the gain of drafts that follow poor drafts. A request's mean
    survival decays by DECAY per step after a poor draft, and its mean gain per step. `typical` [K] is the mean survival
    of all requests' drafts; it stands for that of a new request, which has had no draft after a poor one."""

    def __init__(self, num_slots: int, max_num_draft: int):
        self.typical, self.mean_survival = np.zeros(max_num_draft), np.zeros((num_slots, max_num_draft))
        self.mean_gain = np.zeros(num_slots)
        self.was_poor, self.is_new = np.zeros(num_slots, bool), np.ones(num_slots, bool)
        self._trials = Trials()  # of the drafter

    def clear(self, slot: int) -> None:
        self.mean_gain[slot], self.was_poor[slot], self.is_new[slot] = self.typical.sum(), False, True

    def choose(
        self,
        costs: Costs,
        num_fixed: int,
        num_drafts: Sequence[int],
        limit: int,
        read: Callable[[], tuple[Any, Any, int]],
    ) -> int:
        """Chooses for a step with `num_fixed` other tokens. `read` returns acceptance probabilities [S, K], slots [R]
        and the number of requests that sample; it is not called if verification of all drafts costs nothing."""
        budget = sum(num_drafts)
        if budget <= limit and costs.of(num_fixed, budget) <= FREE * costs.of(num_fixed, 0):
            return budget
        accept_probs, slots, num_sampling = read()
        records = accept_probs, self.mean_survival, self.mean_gain, self.was_poor, self.is_new, self.typical
        batch = slots, np.array(num_drafts, np.int64), num_fixed, num_sampling
        return int(best_budget(*records, *batch, *costs, min(budget, limit)))

    def drafter_length(self, reports: Floats, lengths: Sequence[int], step_ms: float, saved_ms: float) -> int:
        """Returns the number of tokens that a drafter drafts for each request, one of these `lengths` (paying_length).

        Args:
            reports: [R, 2] (expected_gains).
            step_ms: time of a step with the shortest length; the longest one takes `saved_ms` more.
        """
        tokens = len(reports) + expected_gains(reports, lengths)
        return lengths[paying_length(tokens, step_ms, saved_ms, self._trials, "passes")]


@compiled("i8(f4[:, :], f8[:, :], f8[:], b1[:], b1[:], f8[:], i8[:], i8[:], i8, i8, f8, f8[:], f8, i8)")
def best_budget(
    accept_probs: Any,  # [S, K]
    mean_survival: Any,  # [S, K], in steps after one with a poor draft; written
    mean_gain: Any,  # [S], expected tokens of a draft; written
    was_poor: Any,  # [S], whether the draft of the step before gained at most POOR_SHARE of that; written
    is_new: Any,  # [S], whether there was no draft after a poor one yet; written
    typical: Any,  # [K]; written
    slots: Any,  # [R]
    num_drafts: Any,  # [R]
    num_fixed: int,
    num_sampling: int,
    draft_ms: float,
    verify_ms: Any,  # by number of tokens
    token_ms: float,  # more ms of each draft token
    limit: int,
) -> int:
    """Returns the number of draft tokens with the best rate of tokens per ms, in a step with `num_fixed` other tokens.
    A lookup's poor draft is often followed by a far better one. A request's score is therefore at least its mean
    survival after poor drafts, or `typical` if it is new and has a draft. A draft that is not known has this score,
    too; if none is known, as at an engine's start and in a trial after steps without drafts, the tokens of all drafts
    count as accepted with GOOD_ACCEPTANCE."""
    scores, count, knows_any = np.empty(num_drafts.sum()), 0, False
    for slot, num_draft in zip(slots, num_drafts):  # noqa: B905
        knows_any |= num_draft > 0 and accept_probs[slot, 0] != UNKNOWN
    for slot, num_draft in zip(slots, num_drafts):  # noqa: B905
        is_known, was, survival, gain = accept_probs[slot, 0] != UNKNOWN, was_poor[slot], 1.0, 0.0
        if num_draft and is_known and was and is_new[slot]:
            mean_survival[slot], is_new[slot] = 0.0, False
        for step in range(num_draft):
            if is_known:
                survival *= accept_probs[slot, step]
                gain += survival
                typical[step] += (1 - SHARED_DECAY) * (survival - typical[step])
                if was:
                    mean_survival[slot, step] += (1 - DECAY) * (survival - mean_survival[slot, step])
            elif not knows_any:
                survival *= GOOD_ACCEPTANCE
            score = mean_survival[slot, step]
            if is_new[slot]:
                score = typical[step] if accept_probs[slot, 0] > 0 else 0.0
            if is_known or not knows_any:
                score = max(survival, score)
            if score > 0:
                scores[count] = score
                count += 1
        if num_draft and is_known:
            was_poor[slot] = gain <= POOR_SHARE * mean_gain[slot]
            mean_gain[slot] += (1 - DECAY) * (gain - mean_gain[slot])
            for step in range(num_draft, len(typical)):  # a longer draft survives no better
                typical[step] = min(typical[step], typical[step - 1])
                mean_survival[slot, step] = min(mean_survival[slot, step], mean_survival[slot, step - 1])
    scores = np.sort(scores[:count])[::-1][:limit].copy()
    after = verify_ms[num_fixed : num_fixed + len(scores) + 1]
    more_ms = after[1:] - after[0] + token_ms * np.arange(1, len(after))
    number, _ = best_number(scores, num_sampling, draft_ms + after[0], more_ms)
    return number
