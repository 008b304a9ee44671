"""Learns the time of a step as a function of its draft tokens from measured steps, and the number of tokens that each
ms must gain.

    ms = base + slope * draft tokens,    slope = (covariation + w * first slope) / (variation + w)

A step's draft tokens are compared with drafts of mean length, and its time with steps of the same number of requests,
since a request that ends removes both its attention and its drafts.

StepTimes (step_times.py) has a table by length, since the scheduler gives all requests one length. The gate's lengths
differ by request, so a batch may have any number of draft tokens, and a line through all steps needs fewer steps to
price a token. (With that table instead of the line, recorded texts played as fast on average, but up to 2.7 % slower at
16 requests, and 6 % slower with other first guesses.) Both handle outliers in the same way, and never rate a longer
draft as cheaper.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from vllm_specplugins.gate.step_times import never_less, place_of
from vllm_specplugins.gate.usual import COUNT, FEW, MS, OUTLIER_RATIO, OUTLIERS, SHARE, add_ms, outliers_after
from vllm_specplugins.kernels.acceptance import DECAY
from vllm_specplugins.structures.arrays import Floats

# A loss in a comment is that of another value in a play of whole-file edits.
COST_DECAY = 0.95  # of the means, per step
MARGIN = 1.05  # times its price a token must gain: estimates err, and the argmax picks those that err upwards
SHARED_MARGIN = 1.5  # times its price without drafts, among several requests
FIRST_SLOPE = 0.05  # cost of one more draft token in steps, before it is measured
SHARED_SLOPE = 0.02  # the same for several requests: their steps take longer; 0.05 loses 3 % at 8 requests
TOKEN_SHARE = 0.32  # largest first slope from 16 requests on, as a share of the time per request
SLOPE_WEIGHT = 1.0  # w, in squared draft tokens of a request
FEW_REQS = 4  # above it, w grows with the number of requests, below with its square
LONGER = 1.35  # factor by which the longest draft may grow with each known step
FREE_LONGER = 1.6  # the same for one request if drafting is free
SHARED_FREE_LONGER = 4.0  # the same for several requests; 2.0 loses 4 % at 8 requests
COLD_STEPS = 50  # steps with prompts after which their times count, if there are no others
SHORT_CONTEXT = 1024  # tokens of all requests below which the time of attention is negligible
SLOPE_MEMORY = 64.0  # squared draft tokens of a request that the record keeps, about; a step keeps DECAY of it or more
BEND_WEIGHT = 8.0  # weight of the line beside a bucket, in steps; without buckets, a CPU loses 5 %
BEYOND_WEIGHT = 0.05  # of the line after the last bucket
MAX_STEP_BLAME = 0.5  # share of a mean step: a larger deviation does not come from drafts


class UsualMs:
    """The usual time of a call, on which one slow call has little effect."""

    def __init__(self) -> None:
        self._record = np.zeros(1 + OUTLIERS)

    def add(self, ms: float) -> None:
        add_ms(self._record, ms)

    @property
    def ms(self) -> float:
        return float(self._record[MS])

    @property
    def num_calls(self) -> int:
        """The number of calls, up to FEW."""
        return int(self._record[COUNT])


@dataclass(slots=True)
class StepCosts:
    """The line for one number of requests, in ms and draft tokens of the whole step."""

    num_reqs: int = 1
    weight: float = 0.0  # decayed number of steps
    mean_ms: float = 0.0  # without drafting
    mean_drafting_ms: float = 0.0
    mean_length: float = 0.0  # draft tokens of a request
    mean_emitted: float = 0.0
    mean_reqs: float = 0.0
    variation: float = 0.0  # sum of squares of the draft tokens about those of mean length
    covariation: float = 0.0  # with the time
    reqs_variation: float = 0.0  # the same of the number of requests
    reqs_covariation: float = 0.0
    num_outliers: float = 0.0  # in a row, so far
    # By bucket of the number of draft tokens: their mean, the mean time, and the number of steps.
    buckets: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """Learns from a step: its time without drafting, the time of drafting before it, its draft tokens and its new
        tokens."""
        off_ms, off_reqs = ms - self.mean_ms, num_reqs - self.mean_reqs
        off_draft = num_draft - num_reqs * self.mean_length
        expected_ms = self.mean_ms + self.slope_ms * max(0.0, off_draft)
        self.num_outliers = outliers_after(self.num_outliers, ms, expected_ms) if self.weight else 0.0
        if 0 < self.num_outliers <= FEW:
            return
        if self.num_outliers or ms * OUTLIER_RATIO < expected_ms:  # steps became slower, or were held up before
            self.weight = self.variation = self.covariation = self.reqs_variation = self.reqs_covariation = 0.0
            self.num_outliers = 0.0
            self.buckets.clear()
        bucket = place_of(1 + num_draft)
        mean_draft, mean_ms, count = self.buckets.get(bucket, (0.0, 0.0, 0.0))
        share = max(SHARE, 1 / (count + 1))
        mean_draft, mean_ms = mean_draft + share * (num_draft - mean_draft), mean_ms + share * (ms - mean_ms)
        self.buckets[bucket] = mean_draft, mean_ms, count + 1
        usual_ms, limit_ms = self.slope_ms * off_draft, MAX_STEP_BLAME * self.mean_ms
        surprise_ms = off_ms - self.request_ms * off_reqs - usual_ms
        drafts_ms = usual_ms + min(max(surprise_ms, -limit_ms), limit_ms)
        self.weight = self.weight * COST_DECAY + 1
        share = 1 / self.weight
        self.mean_ms += share * off_ms
        self.mean_reqs += share * off_reqs
        self.mean_length += share * off_draft / num_reqs
        self.mean_drafting_ms += share * (drafting_ms - self.mean_drafting_ms)
        self.mean_emitted += share * (num_emitted - self.mean_emitted)
        self.reqs_variation = COST_DECAY * self.reqs_variation + (1 - share) * off_reqs * off_reqs
        self.reqs_covariation = COST_DECAY * self.reqs_covariation + (1 - share) * off_reqs * (off_ms - usual_ms)
        # Steps that verify the same number of tokens do not inform the slope, so they erase nothing of its record.
        square = (1 - share) * off_draft * off_draft
        memory = max(DECAY, 1 - square / (SLOPE_MEMORY * self.num_reqs**2))
        self.variation = memory * self.variation + square
        self.covariation = memory * self.covariation + (1 - share) * off_draft * drafts_ms

    def of_size(self, num_reqs: int | None) -> "StepCosts":
        """Returns a copy with the same token price, as a first guess for another number of requests (None: the same
        number)."""
        if num_reqs is None:
            return replace(self, buckets=dict(self.buckets))
        ratio = num_reqs / self.num_reqs
        return replace(
            self,
            num_reqs=num_reqs,
            buckets={},
            mean_emitted=ratio * self.mean_emitted,
            variation=ratio**2 * self.variation,
            covariation=ratio**2 * self.covariation,
        )

    @property
    def slope_ms(self) -> float:
        """Returns the time to verify one more draft token, which is never negative."""
        first = (FIRST_SLOPE if self.num_reqs == 1 else min(SHARED_SLOPE, TOKEN_SHARE / self.num_reqs)) * self.mean_ms
        weight = SLOPE_WEIGHT * self.num_reqs * min(self.num_reqs, FEW_REQS)
        return max(0.0, (self.covariation + weight * first) / (self.variation + weight))

    @property
    def request_ms(self) -> float:
        """Returns the time that one more request adds, with a draft of the mean length; at most its share of a step."""
        share_ms = self.mean_ms / max(1.0, self.mean_reqs)
        return min(max(0.0, self.reqs_covariation / (self.reqs_variation + 1)), share_ms)

    def tokens_ms(self, max_num_draft: int) -> Floats:
        """Returns [K], the time that each further token adds to a step of one request: the line's value, corrected by
        the buckets, and never less than that of the previous token."""
        if not self.buckets:  # known only from other numbers of requests
            return np.full(max_num_draft, self.slope_ms)
        lengths = np.arange(max_num_draft + 1)
        line = self.mean_ms + self.slope_ms * (lengths - self.mean_length)
        places, ms, counts = np.array(sorted(self.buckets.values())).T
        off = (ms - np.interp(places, lengths, line)) * counts / (counts + BEND_WEIGHT)
        weights = np.where(lengths[:-1] < places[-1], 1.0, BEYOND_WEIGHT)
        rising: Floats = never_less(np.diff(line + np.interp(lengths, places, off)), weights)
        return np.maximum(rising, 0.0)

    @property
    def plain_ms(self) -> float:
        """Returns the time of a step without drafts: the line's value, but at least half of the mean."""
        return max(0.5 * self.mean_ms, self.mean_ms - self.slope_ms * self.mean_reqs * self.mean_length)

    def max_length(self, is_free: bool) -> int:
        """Returns the longest draft to try now, which depends on whether drafting is free."""
        free = FREE_LONGER if self.num_reqs == 1 else SHARED_FREE_LONGER
        return int(max(self.weight, (free if is_free else LONGER) ** self.weight))

    @property
    def step_ms(self) -> float:
        return self.mean_ms + self.mean_drafting_ms

    @property
    def tokens_per_ms(self) -> float:
        return self.mean_emitted / self.step_ms

    def break_even_rate(self, num_reqs: int) -> float:
        """Returns the tokens that a draft must gain per ms of its cost."""
        plain_rate = num_reqs / self.plain_ms
        return max(MARGIN * self.tokens_per_ms, (MARGIN if num_reqs == 1 else SHARED_MARGIN) * plain_rate)


class LoadCosts:
    """StepCosts by load: by powers of two of the number of requests, and of their total tokens of context."""

    def __init__(self) -> None:
        self.by_load: dict[tuple[int, int], StepCosts] = {}
        self._num_mixed = 0.0  # steps with prompts before the first step that only decoded

    def counted_ms(self, step_ms: float | None, mixed_ms: float | None) -> float | None:
        """Returns the time of a step that counts. Steps that also read prompts count from step COLD_STEPS on, until the
        first step that only decoded, which replaces the record."""
        is_cold = COLD_STEPS <= self._num_mixed < inf
        if step_ms is None:
            self._num_mixed += 1
            return mixed_ms if is_cold else None
        if is_cold:
            self.by_load.clear()
        self._num_mixed = inf
        return step_ms

    def of(self, num_reqs: int, num_context: int) -> StepCosts | None:
        """Returns the costs of a load, or None if there are no costs yet. A new load starts with the costs of the
        nearest number of requests, and among these of the nearest context."""
        size, context = load = _load(num_reqs, num_context)
        if load not in self.by_load:
            if not self.by_load:
                return None
            nearest = min(self.by_load, key=lambda other: (abs(other[0] - size), abs(other[1] - context)))
            self.by_load[load] = self.by_load[nearest].of_size(num_reqs if nearest[0] != size else None)
        return self.by_load[load]

    def add(self, num_reqs: int, num_context: int, *step: Any) -> None:
        costs = self.of(num_reqs, num_context)
        if costs is None:
            costs = self.by_load[_load(num_reqs, num_context)] = StepCosts(num_reqs)
        costs.add(num_reqs, *step)


def _load(num_reqs: int, num_context: int) -> tuple[int, int]:
    return num_reqs.bit_length(), (num_context // SHORT_CONTEXT).bit_length()
