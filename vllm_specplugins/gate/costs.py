"""The time of an engine's step by its draft tokens, learned from measured steps; and what a ms must bring."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_specplugins.gate.step_times import MAX_OUTLIERS, OUTLIER_RATIO, never_less, size_of
from vllm_specplugins.structures.arrays import Floats

COST_DECAY = 0.95  # of the record of times, by step
MARGIN = 1.05  # a token must be worth so many times its price: estimates err, and the highest of them most
SHARED_MARGIN = 1.5  # and among several requests so many times what it costs those that have no draft
FIRST_SLOPE = 0.05  # cost of verifying one more token, in steps, before it is known
SHARED_SLOPE = 0.02  # and for several requests, whose steps are longer
TOKEN_SHARE = 0.32  # but, from 16 on, no more than so much of what one of the step's own tokens takes
SLOPE_WEIGHT = 1.0  # how much of a record (draft tokens of a request, squared) that guess is worth
FIRST_WEIGHT = 8.0  # of what another number of requests has taught
LONGER = 1.35  # times as long may a draft be with every step that is known
FREE_LONGER, SHARED_FREE_LONGER = 1.6, 4.0  # where drafting costs nothing: of one request, of several
SHORT_CONTEXT = 1024  # tokens of all requests, below which their attention costs nothing that shows
SLOPE_MEMORY = 64.0  # how much of a record is kept at most, where steps differ so much
LEAST_KEPT = 0.8  # of a record, by step: one long draft does not make all others forgotten
BEND_SHARE, BEND_WEIGHT = 0.1, 8.0  # of a time that is known, by step; as so many steps the line alone counts
BEYOND_WEIGHT = 0.05  # of the line there where it was not measured
MAX_STEP_BLAME = 0.5  # of a step without drafts: how much of what was not expected one step may lay to its drafts


@dataclass(slots=True)
class StepCosts:
    """What a step of a batch size costs, fitted as base + slope * draft tokens verified, in ms."""

    num_reqs: int = 1  # a few drafts among many requests say little about the slope
    weight: float = 0.0
    mean_ms: float = 0.0  # without drafting
    mean_drafting_ms: float = 0.0
    mean_draft: float = 0.0
    mean_emitted: float = 0.0
    variation: float = 0.0  # sum of squares of the number of draft tokens about its mean
    covariation: float = 0.0  # with the time
    num_outliers: int = 0  # in a row, so far
    # By the number of draft tokens, rounded: their mean, that of such steps' times, how many there were.
    by_draft: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """One step's time without drafting, the drafting before it, the draft tokens that it verified, its tokens."""
        off_ms, off_draft = ms - self.mean_ms, num_draft - self.mean_draft
        expected_ms = self.mean_ms + self.slope_ms * max(0.0, off_draft)
        self.num_outliers = self.num_outliers + 1 if self.weight and ms > OUTLIER_RATIO * expected_ms else 0
        if 0 < self.num_outliers <= MAX_OUTLIERS:
            return
        if self.num_outliers or ms * OUTLIER_RATIO < expected_ms:  # what was learned holds no longer, or was of hiccups
            self.weight = self.variation = self.covariation = 0.0
            self.num_outliers = 0
            self.by_draft.clear()
        place = size_of(1 + num_draft)[1]
        mean_draft, mean_ms, count = self.by_draft.get(place, (0.0, 0.0, 0.0))
        weight = max(BEND_SHARE, 1 / (count + 1))
        self.by_draft[place] = (
            mean_draft + weight * (num_draft - mean_draft), mean_ms + weight * (ms - mean_ms), count + 1
        )  # fmt: skip
        usual_ms, most_ms = self.slope_ms * off_draft, MAX_STEP_BLAME * self.mean_ms
        drafts_ms = usual_ms + min(max(off_ms - usual_ms, -most_ms), most_ms)
        self.weight = self.weight * COST_DECAY + 1
        share = 1 / self.weight
        self.mean_ms += share * off_ms
        self.mean_draft += share * off_draft
        self.mean_drafting_ms += share * (drafting_ms - self.mean_drafting_ms)
        self.mean_emitted += share * (num_emitted - self.mean_emitted)
        # Steps that all verify as many tokens say nothing about the slope, and so make nothing of it forgotten.
        square = (1 - share) * off_draft * off_draft
        keep = max(LEAST_KEPT, 1 - square / (SLOPE_MEMORY * self.num_reqs**2))
        self.variation = keep * self.variation + square
        self.covariation = keep * self.covariation + (1 - share) * off_draft * drafts_ms

    def of_size(self, num_reqs: int | None) -> "StepCosts":
        """A copy, to begin with among so many requests; None: among as many. A token takes as long among them."""
        if num_reqs is None:
            return replace(self, by_draft=dict(self.by_draft))
        ratio = num_reqs / self.num_reqs
        return replace(
            self,
            num_reqs=num_reqs,
            by_draft={},
            weight=min(self.weight, FIRST_WEIGHT),
            mean_emitted=ratio * self.mean_emitted,
            variation=ratio**2 * self.variation,
            covariation=ratio**2 * self.covariation,
        )

    @property
    def slope_ms(self) -> float:
        """Time that one more draft token to verify takes; never negative."""
        guess = (FIRST_SLOPE if self.num_reqs == 1 else min(SHARED_SLOPE, TOKEN_SHARE / self.num_reqs)) * self.mean_ms
        weight = SLOPE_WEIGHT * self.num_reqs**2
        return max(0.0, (self.covariation + weight * guess) / (self.variation + weight))

    def tokens_ms(self, max_num_draft: int) -> Floats:
        """[K], what each token more of a draft adds to a step of one request: by the line, and how far it is off where
        there were steps; never less than the one before it."""
        if not self.by_draft:  # known from other numbers of requests alone
            return np.full(max_num_draft, self.slope_ms)
        lengths = np.arange(max_num_draft + 1)
        line = self.mean_ms + self.slope_ms * (lengths - self.mean_draft)
        places, ms, counts = np.array(sorted(self.by_draft.values())).T
        off = (ms - np.interp(places, lengths, line)) * counts / (counts + BEND_WEIGHT)
        weights = np.where(lengths[:-1] < places[-1], 1.0, BEYOND_WEIGHT)
        found: Floats = np.maximum(never_less(np.diff(line + np.interp(lengths, places, off)), weights), 0.0)
        return found

    @property
    def plain_ms(self) -> float:
        """Of a step without drafts; the line is not trusted beyond half of the mean."""
        return max(0.5 * self.mean_ms, self.mean_ms - self.slope_ms * self.mean_draft)

    def max_length(self, is_free: bool) -> int:
        """Of the drafts that may be tried: short ones at first, then ever longer ones.

        Args:
            is_free: whether drafting costs nothing.
        """
        free = FREE_LONGER if self.num_reqs == 1 else SHARED_FREE_LONGER
        return int(max(self.weight, (free if is_free else LONGER) ** self.weight))

    @property
    def step_ms(self) -> float:
        return self.mean_ms + self.mean_drafting_ms

    @property
    def tokens_per_ms(self) -> float:
        return self.mean_emitted / self.step_ms


class LoadCosts:
    """Costs of steps by load: by the number of requests and by their tokens of context, both in powers of two."""

    def __init__(self) -> None:
        self.by_load: dict[tuple[int, int], StepCosts] = {}

    def of(self, num_reqs: int, num_context: int) -> StepCosts | None:
        """What is new begins with what the nearest size, and then the nearest context, has taught; None: all is new."""
        size, context = load = _load(num_reqs, num_context)
        if load not in self.by_load:
            if not self.by_load:
                return None
            nearest = min(self.by_load, key=lambda other: (abs(other[0] - size), abs(other[1] - context)))
            self.by_load[load] = self.by_load[nearest].of_size(num_reqs if nearest[0] != size else None)
        return self.by_load[load]

    def add(self, num_reqs: int, num_context: int, *step: Any) -> None:
        """See StepCosts.add."""
        costs = self.of(num_reqs, num_context)
        if costs is None:
            costs = self.by_load[_load(num_reqs, num_context)] = StepCosts(num_reqs)
        costs.add(*step)


def _load(num_reqs: int, num_context: int) -> tuple[int, int]:
    return num_reqs.bit_length(), (num_context // SHORT_CONTEXT).bit_length()


def break_even_rate(costs: StepCosts, num_reqs: int) -> float:
    """Tokens that a draft must be expected to bring for each ms that it costs a batch."""
    of_none = num_reqs / costs.plain_ms
    return max(MARGIN * costs.tokens_per_ms, (MARGIN if num_reqs == 1 else SHARED_MARGIN) * of_none)
