"""How many tokens the exit of a cascade on the device drafts: decided on the host, one step late.

Which of its tokens are verified is adaptive verification's choice; drafting them costs, too, the same whatever comes of
it. Chosen is the depth that promises the most tokens a ms: a draft of n tokens says what all shorter ones would have
brought, so that only going without, and going deeper, has to be tried now and then (see gate.py). Requests are of
kinds: one whose text a lookup follows hardly needs an exit. Goes by counts and by costs that were measured at the
start, not by a clock, so that all ranks choose alike. K: most tokens of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specplugins.proposers.gate import EXPLORE_EVERY, GOOD_ACCEPTANCE

DECAY = 0.9  # of what is known, by step that tells
FORGOTTEN = 0.99  # by step that does not, of how tokens fare that it did not draft: text changes
EXPLORE_SHARE = 0.005  # of the time is spent on trials, at the most
UNKNOWN = 100.0  # tokens: what costs nothing to try is tried first
GUESS_WEIGHT = 0.5  # of what is not known, in steps: GOOD_ACCEPTANCE

Floats = npt.NDArray[np.float64]


def depths(most: int) -> tuple[int, ...]:
    """Of drafts of at most so many tokens, those that are worth a graph of their own.

    >>> depths(5), depths(1)
    ((0, 1, 2, 4, 5), (0, 1))
    """
    return (0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


@dataclass(slots=True)
class _Average:
    """Of tokens emitted and of draft tokens verified, by request; of the exit's own tokens none."""

    emitted: float = 1.0
    verified: float = 0.0
    is_known: bool = False

    def add(self, emitted: float, verified: float) -> None:
        share = 1 - DECAY if self.is_known else 1.0
        self.emitted += share * (emitted - self.emitted)
        self.verified += share * (verified - self.verified)
        self.is_known = True


@dataclass(slots=True)
class _Chain:
    """How many of a draft's tokens there are, by request: of each place, by those in the place before it."""

    here: Floats
    before: Floats
    guess: float

    @classmethod
    def of(cls, width: int, guess: float) -> "_Chain":
        return cls(np.zeros(width), np.zeros(width), guess)

    def add(self, counts: Floats, depth: int) -> None:
        """[K], of which the first ones are known."""
        for sums, values in ((self.here, counts), (self.before, np.concatenate(([1.0], counts[:-1])))):
            sums[:depth] = DECAY * sums[:depth] + values[:depth]
            sums[depth:] *= FORGOTTEN

    def up_to(self, ends: Sequence[int]) -> Floats:
        """Sums of the first places."""
        rates = (self.here + GUESS_WEIGHT * self.guess) / (self.before + GUESS_WEIGHT)
        return np.concatenate(([0.0], rates.cumprod().cumsum()))[list(ends)]


@dataclass(slots=True)
class _Requests:
    """What steps brought requests of one kind, with drafts of the exit and without them."""

    accepted: _Chain
    verified: _Chain
    beside: _Average = field(default_factory=_Average)
    without: _Average = field(default_factory=_Average)

    def expected(self, ends: Sequence[int]) -> tuple[Floats, Floats]:
        """Tokens emitted and draft tokens verified, by depth of the exit."""
        beside, without, is_with = self.beside, self.without, np.array(ends) > 0
        alone = max(without.emitted, beside.emitted) if without.is_known else UNKNOWN
        emitted = np.where(is_with, beside.emitted + self.accepted.up_to(ends), alone)
        return emitted, np.where(is_with, beside.verified + self.verified.up_to(ends), without.verified)


@dataclass(slots=True)
class Brought:
    """What one step has brought requests of a kind, all of them together.

    Args:
        num_reqs: how many they are.
        emitted, verified: tokens that came out, and draft tokens that were looked at.
        exit_accepted, exit_verified: [K], of the exit's tokens in each place.
    """

    num_reqs: int
    emitted: int
    verified: int
    exit_accepted: Floats
    exit_verified: Floats


class ExitGate:
    """What steps bring, with drafts of the exit and without them, by kind of request.

    Args:
        width: K.
        depths: to choose from, ascending, the first 0.
        num_kinds: that requests are told apart by, whatever they mean.
    """

    def __init__(self, width: int, depths: Sequence[int], num_kinds: int = 1):
        self._depths = depths
        self._kinds = [_Requests(_Chain.of(width, GOOD_ACCEPTANCE), _Chain.of(width, 1.0)) for _ in range(num_kinds)]
        self._num_steps = [0] * num_kinds  # since going with it, or without it, was tried, where most are of that kind

    def add(self, kind: int, depth: int, brought: Brought) -> None:
        """What one step has brought requests of this kind, for which the exit had drafted so deep; 0: it had not."""
        if brought.num_reqs == 0:
            return
        own, scale = self._kinds[kind], 1 / brought.num_reqs
        emitted = brought.emitted - brought.exit_accepted.sum()
        verified = brought.verified - brought.exit_verified.sum()
        (own.beside if depth else own.without).add(emitted * scale, verified * scale)
        if depth:
            own.accepted.add(brought.exit_accepted * scale, depth)
            own.verified.add(brought.exit_verified * scale, depth)

    def depth(self, num_reqs: Sequence[int], draft_ms: float, verify_ms: Floats) -> int:
        """How many tokens to draft in this step; now and then with or without it, to see what that would bring.

        Args:
            num_reqs: of each kind.
            draft_ms: of drafting the most tokens that it may, for the whole batch.
            verify_ms: [most tokens], of a step that verifies so many.

        >>> gate = ExitGate(4, (0, 1, 2, 4))
        >>> [gate.depth([1], draft_ms, np.full(9, 10.0)) for draft_ms in (1.0, 16.0, 100.0)]
        [4, 2, 0]
        """
        tokens, verified = np.array(num_reqs) @ np.array(
            [np.concatenate(own.expected(self._depths)) for own in self._kinds]
        ).reshape(len(self._kinds), 2, -1).swapaxes(0, 1)
        places = np.minimum(np.rint(sum(num_reqs) + verified).astype(int), len(verify_ms) - 1)
        times = verify_ms[places] + draft_ms * np.array(self._depths) / self._depths[-1]
        rates = tokens / times
        best, kind = int(rates.argmax()), int(np.argmax(num_reqs))
        other = 0 if best else 1 + int(rates[1:].argmax())
        lost_ms = times[other] - tokens[other] / rates[best]  # by a trial
        self._num_steps[kind] += 1
        if self._num_steps[kind] >= max(EXPLORE_EVERY, lost_ms / times[best] / EXPLORE_SHARE):
            self._num_steps[kind], best = 0, other
        return self._depths[best]
