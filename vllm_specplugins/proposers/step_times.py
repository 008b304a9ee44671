"""How many tokens to draft for each request of a step, one number for all: a table of what steps took decides.

What a step takes is kept by number of requests and draft length k; steps of other sizes with about as many tokens say
what one that was not tried yet may take, and a longer draft never counts as cheaper than a shorter one. What a step
brings is kept by place in the draft: a draft of k tokens says what all shorter ones would have brought. Chosen is the k
with the most tokens a ms. Pure arithmetic: times come in, nothing is measured here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

import numpy as np

CLIFF = 512  # tokens of a step; above them vLLM captures no graph
CLIFF_COST = 1.5  # of a step above it, before it is known
ROOM = 256  # tokens that make a step twice as long as none, before it is known
DECAY = 0.85  # of what drafts bring, by step that tells
FORGOTTEN = 0.99  # by step that does not: text changes
GUESS, GUESS_WEIGHT = 0.75, 0.25  # of what is not known: a token's chance, and for how many requests that counts
WHOLE = 0.95  # the chance of tokens behind a draft that was accepted whole
MOST_SAVED = 4.0  # steps, for trials
TRIAL_EVERY, TRIAL_SHARE = 8, 0.005  # steps between trials, at the least, and of the time, at the most
SURPRISE = 3.0  # standard deviations
TIE = 0.995  # of two that are as good the longer one: it sees more
HICCUP, MAX_HICCUPS = 3.0, 3  # as costs.py has them
UNSURE = 3  # steps, before which a time may be that of a hiccup
SHARE = 0.1  # of a time that is known, by step

_Key = tuple[int, int, bool]  # size, length, whether that is above the cliff


def lengths_up_to(most: int) -> tuple[int, ...]:
    """The lengths that are tried of drafts of at most so many tokens.

    >>> lengths_up_to(31), lengths_up_to(5), lengths_up_to(1)
    ((0, 1, 2, 4, 8, 16, 31), (0, 1, 2, 4, 5), (0, 1))
    """
    return (0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def size_of(num_reqs: int) -> int:
    """The number of requests that stands for this one.

    >>> [size_of(count) for count in (1, 2, 3, 4, 5, 6, 7, 13, 16, 17)]
    [1, 2, 3, 4, 6, 6, 8, 16, 16, 24]
    """
    end = 1 << (num_reqs - 1).bit_length()
    return end * 3 // 4 if num_reqs <= end * 3 // 4 else end


@dataclass(slots=True)
class _Time:
    """Of steps of one size and length. Times err upwards: of the first few the least counts."""

    ms: float = float("inf")
    count: int = 0
    num_hiccups: int = 0  # in a row, so far

    def add(self, ms: float) -> None:
        if self.count < UNSURE:
            self.ms, self.count = min(self.ms, ms), self.count + 1
            return
        self.num_hiccups = self.num_hiccups + 1 if ms > HICCUP * self.ms else 0
        if 0 < self.num_hiccups <= MAX_HICCUPS:
            return
        self.ms += (1.0 if self.num_hiccups else SHARE) * (ms - self.ms)
        self.num_hiccups = 0


@dataclass(slots=True)
class _Stretch:
    """So many places of drafts, from one length to the next: what became of tokens there.

    Args:
        entered: requests of which all tokens before were accepted.
        accepted: tokens of theirs.
        whole: requests of which all tokens here were.
    """

    places: int
    entered: float = 0.0
    accepted: float = 0.0
    whole: float = 0.0

    def add(self, keep: float, entered: float = 0.0, accepted: float = 0.0, whole: float = 0.0) -> None:
        self.entered = keep * self.entered + entered
        self.accepted = keep * self.accepted + accepted
        self.whole = keep * self.whole + whole

    def expected(self, chance: float) -> tuple[float, float]:
        """Tokens accepted of a request that enters, and how likely all are.

        Args:
            chance: of a token, where nothing is known.
        """
        scale = 1 / (self.entered + GUESS_WEIGHT)
        accepted, whole = _run(chance, self.places), chance**self.places
        return scale * (self.accepted + GUESS_WEIGHT * accepted), scale * (self.whole + GUESS_WEIGHT * whole)


class StepTimes:
    """See the module.

    Args:
        most: K.
        measured: ms of a step by its tokens, where that was measured before; relations count, not the times.
    """

    def __init__(self, most: int, measured: Mapping[int, float] | None = None):
        self.lengths = lengths_up_to(most)
        self._shape = sorted((measured or {1: ROOM + 1, 2: ROOM + 2}).items())
        self._times: dict[_Key, _Time] = {}
        self._guesses: dict[_Key, float] = {}
        self._stretches = [_Stretch(end - start) for start, end in pairwise(self.lengths)]
        self._follow: tuple[int, float] | None = None  # up to which length to go on, and what that should bring
        self._saved_ms, self._num_steps, self._num_trials = 0.0, 0, 0  # for trials, since the last one, so far

    def add(self, num_reqs: int, k: int, ms: float, emitted: Sequence[int]) -> None:
        """A step of nothing but decoding is over.

        Args:
            k: the draft length that it was planned with.
            ms: from the step before to this one.
            emitted: tokens that each request got, 1 to k + 1.
        """
        time = self._times.setdefault(_key(num_reqs, k), _Time())
        time.add(ms)
        if time.count <= UNSURE:
            self._guesses.clear()
        if k not in self.lengths:
            return
        at, counts = self.lengths.index(k), Counter(emitted)
        self._follow = self._followed(at, counts[k + 1] / max(1, len(emitted)), len(emitted))
        for (start, end), stretch in zip(pairwise(self.lengths), self._stretches, strict=True):
            if end > k:
                stretch.add(FORGOTTEN)
                continue
            entered = [(tokens - 1 - start, count) for tokens, count in counts.items() if tokens > start]
            accepted = sum(min(more, end - start) * count for more, count in entered)
            whole = sum(count for more, count in entered if more >= end - start)
            stretch.add(DECAY, sum(count for _, count in entered), accepted, whole)

    def choose(self, num_reqs: int) -> int:
        """How many tokens to draft for each of so many requests; now and then others, to see what that would bring."""
        times, tokens = self._expected_ms(num_reqs), self._expected_tokens()
        rates = [brought / ms for brought, ms in zip(tokens, times, strict=True)]
        least = TIE * max(rates)
        best = max(at for at, rate in enumerate(rates) if rate >= least)
        self._saved_ms = min(self._saved_ms + TRIAL_SHARE * times[best], MOST_SAVED * times[best])
        self._num_steps += 1
        others = [at for at in (0, best - 1, best + 1) if at < len(rates)] if best else [rates.index(max(rates[1:]))]
        other = others[self._num_trials % len(others)]
        lost_ms = max(0.0, times[other] - tokens[other] / rates[best])
        if self._num_steps < TRIAL_EVERY or lost_ms > self._saved_ms:
            return self.lengths[best]
        self._saved_ms, self._num_steps, self._num_trials = self._saved_ms - lost_ms, 0, self._num_trials + 1
        return self.lengths[other]

    def _followed(self, at: int, share: float, num_reqs: int) -> tuple[int, float] | None:
        """Drafts that were accepted whole far more often than the record says are followed by some twice as long."""
        survival = self._survival()[1][at]
        if at == 0 or share <= survival + SURPRISE * (survival * (1 - survival) / num_reqs) ** 0.5:
            return None
        up_to = min(at + 1, len(self.lengths) - 1)
        return up_to, 1 + share * (self.lengths[at] + _run(WHOLE, self.lengths[up_to] - self.lengths[at]))

    def _survival(self) -> tuple[list[float], list[float]]:
        """By length, tokens of a request, and how likely all drafted ones are accepted."""
        tokens, survival, chance = [1.0], [1.0], GUESS
        for stretch in self._stretches:
            accepted, whole = stretch.expected(chance)
            tokens.append(tokens[-1] + survival[-1] * accepted)
            survival.append(survival[-1] * whole)
            chance = min(WHOLE, whole ** (1 / stretch.places))  # right all along, or not at all
        return tokens, survival

    def _expected_tokens(self) -> list[float]:
        """Of a request, by length."""
        tokens, _ = self._survival()
        if self._follow is not None:
            at, expected = self._follow
            tokens[at] = max(tokens[at], expected)
        return tokens

    def _expected_ms(self, num_reqs: int) -> list[float]:
        """Of a step, by length: never less than of a shorter one, neighbours that say otherwise have their mean."""
        pools: list[tuple[float, float, int]] = []  # mean, weight, lengths
        for k in self.lengths:
            mean, weight = self._expected(num_reqs, k)
            count = 1
            while pools and pools[-1][0] >= mean:
                other, its, more = pools.pop()
                mean, weight, count = (mean * weight + other * its) / (weight + its), weight + its, count + more
            pools.append((mean, weight, count))
        return [mean for mean, _, count in pools for _ in range(count)]

    def _expected(self, num_reqs: int, k: int) -> tuple[float, float]:
        """ms of a step, and what that is worth."""
        own = self._times.get(_key(num_reqs, k))
        if own is not None and own.count >= UNSURE:
            return own.ms, 1.0
        guess = self._guess(num_reqs, k)
        return (guess, 0.1) if own is None else (min(own.ms, guess), 0.5)

    def _guess(self, num_reqs: int, k: int) -> float:
        """By what steps took that had about as many tokens, of as many requests if there were some."""
        key = _key(num_reqs, k)
        if key not in self._guesses:
            known = {other: time.ms for other, time in self._times.items() if other != key and time.count >= UNSURE}
            tokens, size = num_reqs * (1 + k), key[0]
            own = {other: ms for other, ms in known.items() if other[0] == size} or known
            if not own:
                return self._shaped(tokens)
            nearest = min(own, key=lambda other: abs(log(_tokens(other) / tokens)))
            self._guesses[key] = own[nearest] * self._shaped(tokens) / self._shaped(_tokens(nearest))
        return self._guesses[key]

    def _shaped(self, tokens: int) -> float:
        """ms of a step of so many tokens, but for a factor; behind what was measured it goes on as before."""
        (first, its_ms), (last, last_ms) = self._shape[-2:]
        if tokens > last:
            guess = last_ms + (last_ms - its_ms) * (tokens - last) / (last - first)
        else:
            known, ms = zip(*self._shape, strict=True)
            guess = float(np.interp(tokens, known, ms))
        is_measured = tokens <= last or last > CLIFF
        return guess * (CLIFF_COST if tokens > CLIFF and not is_measured else 1.0)


def _key(num_reqs: int, k: int) -> _Key:
    return size_of(num_reqs), k, num_reqs * (1 + k) > CLIFF


def _tokens(key: _Key) -> int:
    size, k, is_above = key
    tokens = size * (1 + k)
    return max(tokens, CLIFF + 1) if is_above else min(tokens, CLIFF)


def _run(chance: float, length: int) -> float:
    """Tokens of a draft that are accepted, where each is with this chance if those before it were."""
    return chance * (1 - chance**length) / (1 - chance)
