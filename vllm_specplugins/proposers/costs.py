"""What a step of an engine costs by its draft tokens, learned from the times of steps; and what a ms is worth."""

from dataclasses import dataclass

COST_DECAY = 0.95  # of the record of times, by step
MARGIN = 1.05  # a token must be worth so many times its price: estimates err, and the highest of them most
SHARED_MARGIN = 1.5  # and among several requests so many times what it costs those that have no draft
FIRST_SLOPE = 0.05  # cost of verifying one more token, in steps, before it is known
SHARED_SLOPE = 0.02  # and for several requests, whose steps are longer
TOKEN_SHARE = 0.32  # but, from 16 on, no more than so much of what one of the step's own tokens takes
SLOPE_WEIGHT = 1.0  # how much of a record (draft tokens of a request, squared) that guess is worth
SLOPE_MEMORY = 64.0  # how much of a record is kept at most


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

    def add(self, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """One step's time without drafting, the drafting before it, the draft tokens that it verified, its tokens."""
        off_ms, off_draft = ms - self.mean_ms, num_draft - self.mean_draft
        if self.weight > 4 and ms > 3 * (self.mean_ms + self.slope_ms * max(0.0, off_draft)):  # a hiccup
            return
        self.weight = self.weight * COST_DECAY + 1
        share = 1 / self.weight
        self.mean_ms += share * off_ms
        self.mean_draft += share * off_draft
        self.mean_drafting_ms += share * (drafting_ms - self.mean_drafting_ms)
        self.mean_emitted += share * (num_emitted - self.mean_emitted)
        # Steps that all verify as many tokens say nothing about the slope, and so make nothing of it forgotten.
        square = (1 - share) * off_draft * off_draft
        keep = max(0.0, 1 - square / (SLOPE_MEMORY * self.num_reqs**2))
        self.variation = keep * self.variation + square
        self.covariation = keep * self.covariation + (1 - share) * off_draft * off_ms

    @property
    def slope_ms(self) -> float:
        """Time that one more draft token to verify takes; never negative."""
        guess = (FIRST_SLOPE if self.num_reqs == 1 else min(SHARED_SLOPE, TOKEN_SHARE / self.num_reqs)) * self.mean_ms
        weight = SLOPE_WEIGHT * self.num_reqs**2
        return max(0.0, (self.covariation + weight * guess) / (self.variation + weight))

    @property
    def plain_ms(self) -> float:
        """Of a step without drafts; the line is not trusted beyond half of the mean."""
        return max(0.5 * self.mean_ms, self.mean_ms - self.slope_ms * self.mean_draft)

    @property
    def step_ms(self) -> float:
        return self.mean_ms + self.mean_drafting_ms

    @property
    def tokens_per_ms(self) -> float:
        return self.mean_emitted / self.step_ms


def worth_of_a_ms(costs: StepCosts, num_reqs: int) -> float:
    """Tokens that a draft must be expected to bring for each ms that it costs a batch."""
    rate = MARGIN * costs.tokens_per_ms
    return rate if num_reqs == 1 else max(rate, SHARED_MARGIN * num_reqs / costs.plain_ms)
