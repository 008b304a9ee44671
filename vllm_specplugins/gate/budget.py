"""Chooses the number of draft tokens that a step verifies, where the device trims drafts: the one with the best rate of
tokens per ms, from acceptance probabilities that are a step old and a table of step times. S: slots of requests, R:
requests of a step, K: max draft tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.kernels.compiled import compiled

FREE = 1.02  # a step with all drafts that takes this times one without drafts costs nothing
DECAY = 0.8  # per step after one without a match, of a request's mean survival


class Costs(NamedTuple):
    """Milliseconds of a step: beside its tokens, by number of tokens, and of each draft token beside that."""

    step_ms: float
    verify_ms: Any
    token_ms: float = 0.0

    def of(self, num_fixed: int, num_draft: int) -> float:
        return float(self.step_ms + self.verify_ms[num_fixed + num_draft] + num_draft * self.token_ms)


class Prices(NamedTuple):
    """Milliseconds per token of context: for a request that reads the context, and for a draft token that attends to
    it."""

    read_ms: float = 0.0
    attend_ms: float = 0.0

    def costs(self, draft_ms: float, verify_ms: Any, num_reqs: int, context: float) -> Costs:
        """The costs of a step, from tables without a context, and its requests' mean context."""
        return Costs(draft_ms + self.read_ms * num_reqs * context, verify_ms, self.attend_ms * context)


class StepBudget:
    """Chooses for steps one after the other, and remembers by slot what earlier matches were worth."""

    def __init__(self, num_slots: int, max_num_draft: int):
        self.mean_survival, self.had_none = np.zeros((num_slots, max_num_draft)), np.zeros(num_slots, bool)

    def clear(self, slot: int) -> None:
        self.mean_survival[slot], self.had_none[slot] = 0.0, False

    def choose(
        self,
        costs: Costs,
        num_fixed: int,
        num_drafts: Sequence[int],
        limit: int,
        read: Callable[[], tuple[Any, Any, int]],
    ) -> int:
        """Chooses for a step with `num_fixed` tokens beside these drafts. `read` returns acceptance probabilities [S,
        K], slots [R] and the number of requests that sample; it is not called if verifying all costs nothing."""
        budget = sum(num_drafts)
        if budget <= limit and costs.of(num_fixed, budget) <= FREE * costs.of(num_fixed, 0):
            return budget
        accept_probs, slots, num_sampling = read()
        records, counts = (accept_probs, self.mean_survival, self.had_none), np.array(num_drafts, np.int64)
        return int(best_budget(*records, slots, counts, num_fixed, num_sampling, *costs, min(budget, limit)))


@compiled("i8(f4[:, :], f8[:, :], b1[:], i8[:], i8[:], i8, i8, f8, f8[:], f8, i8)")
def best_budget(
    accept_probs: Any,  # [S, K]
    mean_survival: Any,  # [S, K], in steps after one without a match; written
    had_none: Any,  # [S], whether the step before had no match; written
    slots: Any,  # [R]
    num_drafts: Any,  # [R]
    num_fixed: int,
    num_sampling: int,
    draft_ms: float,
    verify_ms: Any,  # by number of tokens
    token_ms: float,  # of a draft token beside that
    limit: int,
) -> int:
    """The number of draft tokens with the best rate of tokens per ms, in a step with `num_fixed` other tokens. A lookup
    without a match has probability 0. After a step without a match, a request therefore also scores by the mean of its
    earlier matches, so that the next match gets a budget."""
    scores, count = np.empty(num_drafts.sum()), 0
    for slot, num_draft in zip(slots, num_drafts):  # noqa: B905
        survival, had = 1.0, had_none[slot]
        for step in range(num_draft):
            survival *= accept_probs[slot, step]
            if had:
                mean_survival[slot, step] += (1 - DECAY) * (survival - mean_survival[slot, step])
            score = max(survival, mean_survival[slot, step])
            if score > 0:
                scores[count] = score
                count += 1
        if num_draft:
            had_none[slot] = accept_probs[slot, 0] == 0
    scores = np.sort(scores[:count])
    tokens, best = float(num_sampling), 0
    best_rate = tokens / (draft_ms + verify_ms[num_fixed])
    for budget in range(1, min(count, limit) + 1):
        tokens += scores[count - budget]
        rate = tokens / (draft_ms + verify_ms[num_fixed + budget] + budget * token_ms)
        if rate > best_rate:
            best_rate, best = rate, budget
    return best
