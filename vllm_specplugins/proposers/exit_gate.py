"""How many tokens the exit of a cascade on the device drafts: decided on the host, one step late.

Which of its tokens are verified is adaptive verification's choice; drafting them costs, too, the same whatever comes of
it. Chosen is the depth that promises the most tokens a ms: a draft of n tokens says what all shorter ones would have
brought, so that only going without, and going deeper, has to be tried now and then (see gate.py). Requests are of
kinds: one whose text a lookup follows hardly needs an exit. Goes by counts and by costs that were measured at the
start, not by a clock, so that all ranks choose alike. K: most tokens of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
class Brought:
    """What one step has brought requests of a kind, all of them together.

    Args:
        num_reqs: how many they are.
        emitted, verified: tokens that came out, and draft tokens that were looked at.
        exit_accepted, exit_verified: [K], of the exit's tokens in each place.
    """

    num_reqs: int
    emitted: float
    verified: float
    exit_accepted: Floats
    exit_verified: Floats


class ExitGate:
    """What steps bring, with drafts of the exit and without them, by kind of request.

    It runs in every step between two launches, and so has few operations: arrays of all kinds at once.

    Args:
        width: K.
        depths: to choose from, ascending, the first 0.
        num_kinds: that requests are told apart by, whatever they mean.
    """

    def __init__(self, width: int, depths: Sequence[int], num_kinds: int = 1):
        self._depths, self._ends = depths, np.array(depths)
        # Of the exit's tokens that were accepted, and of those verified: how many there are in each place, by request,
        # and how many in the place before.
        self._sums = np.zeros((num_kinds, 2, 2, width))
        self._guesses = np.array([[GOOD_ACCEPTANCE], [1.0]])
        # Where the exit had not drafted, and beside its drafts.
        self._usual = [(_Average(), _Average()) for _ in range(num_kinds)]
        self._num_steps = [0] * num_kinds  # since going with it, or without it, was tried, where most are of that kind

    def add(self, kind: int, depth: int, brought: Brought) -> None:
        """What one step has brought requests of this kind, for which the exit had drafted so deep; 0: it had not."""
        if brought.num_reqs == 0:
            return
        scale, exits = 1 / brought.num_reqs, np.array((brought.exit_accepted, brought.exit_verified))
        accepted, verified = exits.sum(axis=1).tolist()
        usual = self._usual[kind][depth > 0]
        usual.add((brought.emitted - accepted) * scale, (brought.verified - verified) * scale)
        if depth:
            exits = exits[:, :depth] * scale
            told, sums = np.ones((2, 2, depth)), self._sums[kind]
            told[:, 0], told[:, 1, 1:] = exits, exits[:, :-1]
            sums[..., :depth] = DECAY * sums[..., :depth] + told
            sums[..., depth:] *= FORGOTTEN

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
        tokens, verified = np.tensordot(num_reqs, self._expected(), 1)
        places = np.minimum(np.rint(sum(num_reqs) + verified).astype(int), len(verify_ms) - 1)
        times = verify_ms[places] + draft_ms * self._ends / self._depths[-1]
        rates = tokens / times
        best, kind = int(rates.argmax()), int(np.argmax(num_reqs))
        other = 0 if best else 1 + int(rates[1:].argmax())
        lost_ms = times[other] - tokens[other] / rates[best]  # by a trial
        self._num_steps[kind] += 1
        if self._num_steps[kind] >= max(EXPLORE_EVERY, lost_ms / times[best] / EXPLORE_SHARE):
            self._num_steps[kind], best = 0, other
        return self._depths[best]

    def _expected(self) -> Floats:
        """[kinds, 2, depths]: tokens emitted and draft tokens verified."""
        rates = (self._sums[:, :, 0] + GUESS_WEIGHT * self._guesses) / (self._sums[:, :, 1] + GUESS_WEIGHT)
        up_to = np.zeros((*rates.shape[:2], rates.shape[2] + 1))
        rates.cumprod(axis=2).cumsum(axis=2, out=up_to[:, :, 1:])
        others = np.array([(beside.emitted, beside.verified) for _, beside in self._usual])
        expected: Floats = others[:, :, None] + up_to[:, :, self._ends]
        for own, (without, beside) in zip(expected, self._usual, strict=True):
            alone = max(without.emitted, beside.emitted) if without.is_known else UNKNOWN
            own[:, 0] = alone, without.verified
        return expected
