"""The gate: how many tokens a request gets drafted, and by whom, so that speculation does not lose.

A token more is worth its chance of being accepted, and costs the time in which the engine could have emitted others:
draft the k-th token while a_1 ... a_k >= rate * (cost of verifying one more token + its share of the cost of drafting
it), where a_i is the chance that token i is accepted after the ones before it were, and rate the tokens per ms that the
engine emits now (Dinkelbach's method for a ratio, one iteration a step), or more among several requests. The a_i are
averaged exponentially by request, stage and grade of confidence, the costs by batch size; a batch size that is new
starts without drafts, then with short ones. Of two stages the one with the larger gain drafts. Pure arithmetic: times
come in, nothing is measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.8  # of a request's record of a stage, by draft; half of it is forgotten after three drafts
SHARED_DECAY = 0.98  # of the record of all requests
PRIOR_WEIGHT = 4.0  # the record of all requests counts as so many tokens of a request's own
FIRST_GUESS = 0.6  # acceptance of a stage that was never tried
GOOD_ACCEPTANCE = 0.75  # what text that suits a stage may be expected to have, whatever the record of other text
FIRST_CONFIDENCE = 1.0  # of a stage that says none, or has not drafted yet
EXPLORE_EVERY = 12  # steps without a draft after which a stage that does not pay is tried again, at the earliest
EXPLORE_SHARE = 0.01  # of the time is spent on such trials, at the most
COST_DECAY = 0.95  # of the record of times, by step
MARGIN = 1.05  # a token must be worth so many times its price: estimates err, and the highest of them most
SHARED_MARGIN = 1.5  # and among several requests so many times what it costs those that have no draft
FIRST_SLOPE = 0.05  # cost of verifying one more token, in steps, before it is known
SHARED_SLOPE = 0.02  # and for several requests, whose steps are longer
SLOPE_WEIGHT = 1.0  # how much of a record (draft tokens of a request, squared) that guess is worth
SLOPE_MEMORY = 64.0  # how much of a record is kept at most


def confidence_grade(confidence: float) -> int:
    """0 to 3: a draft's grade of confidence. A match of 2 tokens says little, one of 8 a lot.

    >>> [confidence_grade(length) for length in (1, 2, 3, 4, 6, 8, 16)]
    [0, 0, 1, 1, 2, 2, 3]
    """
    return (confidence > 2) + (confidence > 4) + (confidence > 8)


class Record:
    """Decaying counts, by grade of confidence, of tokens that could have been accepted and of those that were.

    Every accepted token makes the one behind it surer by 1: where a match of 3 tokens was right about the next one, it
    is a match of 4. Drafts are right all along or not at all far more often than a constant rate would have them.
    """

    __slots__ = ("_accepted", "_tried", "whole")

    def __init__(self) -> None:
        self._tried = [0.0] * 4
        self._accepted = [0.0] * 4
        self.whole = 0  # length of the last draft if all of it was accepted

    def add(self, confidence: float, num_draft: int, num_accepted: int, decay: float) -> None:
        """A draft's fate: tokens behind the first rejected one were not tried."""
        self.whole = num_draft if num_accepted == num_draft else 0
        last_grade = -1
        for index in range(min(num_accepted + 1, num_draft)):
            grade = confidence_grade(confidence + index)
            if grade != last_grade:
                self._tried[grade] *= decay
                self._accepted[grade] *= decay
                last_grade = grade
            self._tried[grade] += 1
            self._accepted[grade] += index < num_accepted

    def rate(self, grade: int, prior: float) -> float:
        """Chance that a token of this grade is accepted, the ones before it being right."""
        return (self._accepted[grade] + PRIOR_WEIGHT * prior) / (self._tried[grade] + PRIOR_WEIGHT)


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
        guess = (FIRST_SLOPE if self.num_reqs == 1 else SHARED_SLOPE) * self.mean_ms
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


def _worth_of_a_ms(costs: StepCosts, num_reqs: int) -> float:
    """Tokens that a draft must be expected to bring for each ms that it costs a batch."""
    rate = MARGIN * costs.tokens_per_ms
    return rate if num_reqs == 1 else max(rate, SHARED_MARGIN * num_reqs / costs.plain_ms)


class Gate:
    """Chooses draft lengths, and between stages."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, Record]] = {}  # by stage
        self._shared: dict[int, Record] = {}  # of all requests, by stage
        self._costs: dict[int, StepCosts] = {}
        self._sizes: set[int] = set()  # of batches that there have been
        self._draft_ms: dict[int, float] = {}  # by stage, a token of the whole batch
        self._draft_calls: dict[int, int] = {}
        self._quiet: dict[int, int] = {}  # by stage, steps in which somebody went without and nobody was tried

    def add_step(self, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        """A step of nothing but decoding is over. See StepCosts.add."""
        size = num_reqs.bit_length()
        if size not in self._sizes:  # the first step of a size warms up caches and compilers
            self._sizes.add(size)
            return
        self._costs.setdefault(size, StepCosts(num_reqs)).add(ms, drafting_ms, num_draft, num_emitted)

    def add_drafting(self, stage: int, ms: float, num_tokens: int) -> None:
        """What a stage took to draft so many tokens for each request of the batch, all at once."""
        if num_tokens == 0:
            return
        calls = self._draft_calls[stage] = self._draft_calls.get(stage, -1) + 1
        if calls:  # the first one warms up caches and compilers
            old = self._draft_ms.get(stage, 0.0)
            self._draft_ms[stage] = old + max(0.1, 1 / calls) * (ms / num_tokens - old)

    def add_fate(self, request_id: str, stage: int, confidence: float, num_draft: int, num_accepted: int) -> None:
        """What became of a draft."""
        self._record(request_id, stage).add(confidence, num_draft, num_accepted, DECAY)
        self._shared_record(stage).add(confidence, num_draft, num_accepted, SHARED_DECAY)

    def lengths(
        self,
        request_ids: Sequence[str],
        stage: int,
        confidences: Sequence[float],
        most: Sequence[int],
        rivals: Sequence[int | None] | None = None,
    ) -> list[int]:
        """How many tokens, at most `most`, to draft for each request from a stage that is so confident.

        None where the request's rival, another stage, is expected to gain more.
        """
        costs = self._costs.get(len(request_ids).bit_length())
        rate = _worth_of_a_ms(costs, len(request_ids)) if costs else 0.0
        price = rate * costs.slope_ms if costs else FIRST_SLOPE
        lengths: list[int] = []
        gains: list[float] = []  # by draft token, of the whole batch
        for row, (request_id, confidence, limit) in enumerate(zip(request_ids, confidences, most, strict=True)):
            worths = self._worths(request_id, stage, confidence, limit, price)
            rival = rivals[row] if rivals is not None else None
            if worths and rival is not None:
                share = rate * self._draft_ms.get(rival, 0.0) / len(request_ids)
                others = self._worths(request_id, rival, FIRST_CONFIDENCE, limit, price + share)
                worths = [] if sum(others) > sum(worths) else worths
            for index, worth in enumerate(worths):
                if index == len(gains):
                    gains.append(0.0)
                gains[index] += worth
            lengths.append(len(worths))
        # Drafting a token costs the same for one request as for all: so far as it pays for the batch.
        draft_price = rate * self._draft_ms.get(stage, 0.0)
        depth = next((k for k, gain in enumerate(gains) if gain < draft_price), len(gains))
        depth = min(depth, int(costs.weight) if costs else 0)
        lengths = [min(length, depth) for length in lengths]
        if costs is None:
            return lengths
        if price + draft_price / len(lengths) < GOOD_ACCEPTANCE:
            lengths = self._followed(lengths, request_ids, stage, most)
        return self._explored(lengths, stage, most, costs)

    def _worths(self, request_id: str, stage: int, confidence: float, limit: int, price: float) -> list[float]:
        """What each token of a draft is worth, in tokens, as long as that is more than nothing."""
        record, shared = self._record(request_id, stage), self._shared_record(stage)
        worths: list[float] = []
        chance, last_grade, acceptance = 1.0, -1, 0.0
        for index in range(limit):
            grade = confidence_grade(confidence + index)
            if grade != last_grade:
                acceptance, last_grade = record.rate(grade, shared.rate(grade, FIRST_GUESS)), grade
            chance *= acceptance
            if chance < price:
                break
            worths.append(chance - price)
        return worths

    def _followed(self, lengths: list[int], request_ids: Sequence[str], stage: int, most: Sequence[int]) -> list[int]:
        """A draft that was accepted whole is followed by one twice as long, whatever the record says: text changes."""
        return [
            length or min(2 * self._record(request_id, stage).whole, limit)
            for request_id, length, limit in zip(request_ids, lengths, most, strict=True)
        ]

    def _explored(self, lengths: list[int], stage: int, most: Sequence[int], costs: StepCosts) -> list[int]:
        """Now and then one token for those who would get none, as often as EXPLORE_SHARE allows."""
        without = sum(1 for length, limit in zip(lengths, most, strict=True) if limit and not length)
        if not without:
            return lengths
        quiet = self._quiet[stage] = self._quiet.get(stage, 0) + 1
        trial_ms = without * costs.slope_ms + self._draft_ms.get(stage, 0.0)
        if quiet < max(EXPLORE_EVERY, trial_ms / costs.step_ms / EXPLORE_SHARE):
            return lengths
        self._quiet[stage] = 0
        return [length or min(1, limit) for length, limit in zip(lengths, most, strict=True)]

    def _record(self, request_id: str, stage: int) -> Record:
        records = self._requests.get(request_id)
        if records is None:
            records = self._requests[request_id] = {}
        return records.get(stage) or records.setdefault(stage, Record())

    def _shared_record(self, stage: int) -> Record:
        return self._shared.get(stage) or self._shared.setdefault(stage, Record())

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the records of these requests."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
