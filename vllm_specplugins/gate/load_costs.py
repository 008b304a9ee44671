"""Estimates the time of a step from the engine's profile (profile.py) and from measured steps, and computes the number
of tokens that each ms must gain.

    ms = mean + scale * (table ms of its tokens - table ms of as many requests with drafts of mean length)
    table ms = profile ms + BESIDE_SHARE of the difference between mean and profile, in proportion to the tokens
    scale = (covariation + w) / (variation + w)

A step also reads a context, samples, and waits for the host. Each load, a number of requests and a context, therefore
has a mean time, and a scale by which its draft tokens take longer than in the table.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from vllm_specplugins.gate.best_rate import best_number
from vllm_specplugins.gate.profile import StepProfile, guess
from vllm_specplugins.gate.usual import FEW, OUTLIER_RATIO, SHARE, outliers_after
from vllm_specplugins.kernels.acceptance import DECAY
from vllm_specplugins.structures.arrays import Floats

COST_DECAY = 1 - SHARE  # of the means, per step
MARGIN = 1.25  # times its price a token must gain: times err, and a maximum picks the rate that errs most
BESIDE_SHARE = 0.125  # with 0.5, cascades lose 0.5 %: passes of vLLM's drafter are part of a step
SCALE_WEIGHT = 0.2  # root of w, as a share of a step; with 0.1, two slow steps can halve the scale for long
COLD_STEPS = 50  # steps with prompts after which their times count, if there are no others
SHORT_CONTEXT = 1024  # tokens of all requests below which the time of attention is negligible
SCALE_MEMORY = 64.0  # multiple of w that the record keeps, about; a step keeps DECAY of it or more
MAX_STEP_BLAME = 0.5  # share of a mean step: a larger deviation does not come from drafts


@dataclass(slots=True)
class StepCosts:
    """The times of one load, in ms and draft tokens of the whole step."""

    profile: StepProfile
    weight: float = 0.0  # decayed number of steps
    mean_ms: float = 0.0  # without drafting
    mean_drafting_ms: float = 0.0
    mean_length: float = 0.0  # draft tokens of a request
    mean_emitted: float = 0.0
    mean_reqs: float = 0.0
    variation: float = 0.0  # sum of squares of the table's ms about those of mean length
    covariation: float = 0.0  # with the time
    reqs_variation: float = 0.0  # the same of the number of requests
    reqs_covariation: float = 0.0
    num_outliers: float = 0.0  # in a row, so far

    def add(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """Learns from a step: its time without drafting, the time of drafting before it, its draft tokens and its new
        tokens."""
        off_ms, off_reqs = ms - self.mean_ms, num_reqs - self.mean_reqs
        off_length = num_draft / num_reqs - self.mean_length
        off_table = self._table_ms(num_reqs + num_draft) - self._table_ms(num_reqs * (1 + self.mean_length))
        usual_ms = self.scale * off_table
        expected_ms = self.mean_ms + max(0.0, usual_ms)
        self.num_outliers = outliers_after(self.num_outliers, ms, expected_ms) if self.weight else 0.0
        if 0 < self.num_outliers <= FEW:
            return
        if self.num_outliers or ms * OUTLIER_RATIO < expected_ms:  # steps became slower, or were held up before
            self.weight = self.variation = self.covariation = self.reqs_variation = self.reqs_covariation = 0.0
            self.num_outliers = 0.0
        limit_ms = MAX_STEP_BLAME * self.mean_ms
        surprise_ms = off_ms - self.request_ms * off_reqs - usual_ms
        drafts_ms = usual_ms + min(max(surprise_ms, -limit_ms), limit_ms)
        self.weight = self.weight * COST_DECAY + 1
        share = 1 / self.weight
        self.mean_ms += share * off_ms
        self.mean_reqs += share * off_reqs
        self.mean_length += share * off_length
        self.mean_drafting_ms += share * (drafting_ms - self.mean_drafting_ms)
        self.mean_emitted += share * (num_emitted - self.mean_emitted)
        self.reqs_variation = COST_DECAY * self.reqs_variation + (1 - share) * off_reqs * off_reqs
        self.reqs_covariation = COST_DECAY * self.reqs_covariation + (1 - share) * off_reqs * (off_ms - usual_ms)
        # Steps that verify the same number of tokens do not inform the scale, so they erase nothing of its record.
        square = (1 - share) * off_table * off_table
        memory = max(DECAY, 1 - square / (SCALE_MEMORY * self._prior_weight))
        self.variation = memory * self.variation + square
        self.covariation = memory * self.covariation + (1 - share) * off_table * drafts_ms

    @classmethod
    def first(cls, profile: StepProfile, num_reqs: int) -> "StepCosts":
        """Returns the costs before the first step."""
        return cls(profile, mean_ms=profile.ms(num_reqs), mean_emitted=num_reqs, mean_reqs=num_reqs)

    def of_size(self, num_reqs: int | None) -> "StepCosts":
        """Returns a copy as a first guess for another number of requests (None: the same number)."""
        if num_reqs is None:
            return replace(self)
        ratio, tokens = num_reqs / self.mean_reqs if self.mean_reqs else 1.0, num_reqs * (1 + self.mean_length)
        mean_ms = self.mean_ms * self.profile.ms(tokens) / self._mean_profile
        return replace(self, mean_reqs=num_reqs, mean_ms=mean_ms, mean_emitted=ratio * self.mean_emitted)

    @property
    def _mean_profile(self) -> float:
        return self.profile.ms(max(1.0, self.mean_reqs * (1 + self.mean_length)))

    @property
    def _prior_weight(self) -> float:
        return (SCALE_WEIGHT * self._mean_profile) ** 2

    @property
    def scale(self) -> float:
        """Returns the ratio of the time of draft tokens to their time in the table, which is never negative."""
        weight = self._prior_weight
        return max(0.0, (self.covariation + weight) / (self.variation + weight))

    @property
    def _token_ms(self) -> float:
        """Returns the ms of each token beside the profile: without them, a token that took no time at the engine's
        start would be free with any context."""
        beside_ms = max(0.0, self.mean_ms - self._mean_profile)
        return BESIDE_SHARE * beside_ms / max(1.0, self.mean_reqs * (1 + self.mean_length))

    def _table_ms(self, num_tokens: float) -> float:
        return self.profile.ms(num_tokens) + num_tokens * self._token_ms

    def after(self, num_reqs: int, number: int) -> Floats:
        """Returns [number + 1], by how much 0, 1, ... draft tokens lengthen a step of these requests."""
        ms: Floats = self.scale * (self.profile.after(num_reqs, number) + self._token_ms * np.arange(number + 1))
        return ms

    @property
    def request_ms(self) -> float:
        """Returns the time that one more request adds, with a draft of the mean length; at most its share of a step."""
        share_ms = self.mean_ms / max(1.0, self.mean_reqs)
        return min(max(0.0, self.reqs_covariation / (self.reqs_variation + 1)), share_ms)

    def more_ms(self, num_reqs: int) -> float:
        """Returns the time of one draft token more for each of these requests."""
        return float(self.after(num_reqs, num_reqs)[-1])

    def best_rate(self, num_reqs: int, survivals: Floats) -> float:
        """Returns the tokens that a ms is worth: the best rate of a step with these drafts, or the rate of recent
        steps, if it is better. `survivals` [any number] are the probabilities that drafts are accepted up to each
        token."""
        scores = np.sort(survivals[survivals > 0])[::-1].copy()
        more_ms = MARGIN * self.after(num_reqs, len(scores))
        _, rate = best_number(scores, num_reqs, self.plain_ms, more_ms[1:])
        return float(max(rate, self.tokens_per_ms))

    def price(self, rate: float, num_reqs: int, survivals: Floats) -> float:
        """Returns the price in tokens of one more draft token, if a ms is worth `rate` tokens, at which the tokens with
        the largest common gain are verified: it lies between the last one that is verified and the next one."""
        scores, factor = np.sort(survivals[survivals > 0])[::-1], MARGIN * rate
        prices = factor * self.after(num_reqs, len(scores) + num_reqs)
        number = int((np.concatenate(([0.0], scores.cumsum())) - prices[: len(scores) + 1]).argmax())
        price = float(prices[number + num_reqs] - prices[number]) / num_reqs
        if number < len(scores):
            price = max(price, float(np.nextafter(scores[number], 1)))
        return min(price, float(scores[number - 1])) if number else price

    @property
    def plain_ms(self) -> float:
        """Returns the time of a step without drafts: the estimate, but at least half of the mean."""
        drafts_ms = self._table_ms(self.mean_reqs * (1 + self.mean_length)) - self._table_ms(max(1.0, self.mean_reqs))
        plain = self.mean_ms - self.scale * drafts_ms
        return max(0.5 * self.mean_ms, plain)

    @property
    def step_ms(self) -> float:
        return self.mean_ms + self.mean_drafting_ms

    @property
    def tokens_per_ms(self) -> float:
        return self.mean_emitted / self.step_ms


class LoadCosts:
    """StepCosts by load: by powers of two of the number of requests, and of their total tokens of context."""

    def __init__(self) -> None:
        self.profile: StepProfile | None = None
        self._has_guessed = False
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
            self.profile = None if self._has_guessed else self.profile
        self._num_mixed = inf
        return step_ms

    def of(self, num_reqs: int, num_context: int) -> StepCosts | None:
        """Returns the costs of a load; None before the first step if there is no profile. A new load starts with the
        costs of the nearest number of requests, and among these of the nearest context."""
        size, context = load = _load(num_reqs, num_context)
        if load not in self.by_load:
            if not self.by_load:
                if self.profile is None:
                    return None
                self.by_load[load] = StepCosts.first(self.profile, num_reqs)
                return self.by_load[load]
            nearest = min(self.by_load, key=lambda other: (abs(other[0] - size), abs(other[1] - context)))
            self.by_load[load] = self.by_load[nearest].of_size(num_reqs if nearest[0] != size else None)
        return self.by_load[load]

    def add(self, num_reqs: int, num_context: int, ms: float, *step: Any) -> None:
        if self.profile is None:
            self.profile, self._has_guessed = guess(num_reqs, ms), True
        costs = self.of(num_reqs, num_context)
        assert costs is not None
        costs.add(num_reqs, ms, *step)


def _load(num_reqs: int, num_context: int) -> tuple[int, int]:
    return num_reqs.bit_length(), (num_context // SHORT_CONTEXT).bit_length()
