"""Chooses one draft length for all requests of a step, from measured step times.

    length = argmax of tokens(length) / ms(length)

`ms` is recorded by number of requests and length. An unknown time is estimated from steps with a similar number of
tokens, and a longer draft never counts as cheaper than a shorter one. `tokens` is recorded by draft position, since a
draft also shows the gain of each shorter draft. From time to time a step tries another length. If every step also
processes prompts, a step of many requests is weighted by the requests' share of its tokens until a purer step is known.
The caller measures all times. A size with steps on both sides of the largest CUDA graph has the mean of both times.
R: requests, L: lengths.
"""

from collections.abc import Sequence
from math import ceil, inf, log, log2
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.gate.trials import EXPLORE_SHARE, GOOD_ACCEPTANCE, Trials
from vllm_specplugins.gate.usual import COUNT, FEW, MS, OUTLIER_RATIO, OUTLIERS, SHARE, add_ms, never_less
from vllm_specplugins.kernels.acceptance import SHARED_DECAY
from vllm_specplugins.kernels.compiled import compiled, inlined

ROOM = 256  # tokens that double the time of a step, before it is measured
GUESS_WEIGHT = 0.25  # weight in requests of GOOD_ACCEPTANCE, the prior of a token's acceptance probability
WHOLE = 0.95  # largest acceptance probability of a stretch without a record
TIE = 0.995  # share of the best rate: the longest length above it is chosen, since it informs more
NUM_SIZES = 34  # places of place_of
MIXED = OUTLIERS + 1  # column of the time by mixed steps


def lengths_up_to(max_num_draft: int, longest_chain: int = 0) -> tuple[int, ...]:
    """Returns the lengths to choose from; with `longest_chain` these are the lengths of chains, and then a whole tree.

    >>> lengths_up_to(31), lengths_up_to(5), lengths_up_to(1), lengths_up_to(15, 6)
    ((0, 1, 2, 4, 8, 16, 31), (0, 1, 2, 4, 5), (0, 1), (0, 1, 2, 4, 6, 15))
    """
    if 0 < longest_chain < max_num_draft:
        return *lengths_up_to(longest_chain), max_num_draft
    powers = (1 << power for power in range(max_num_draft.bit_length()))
    return 0, *(length for length in powers if length < max_num_draft), max_num_draft


@compiled(types.int64(types.int64))
def place_of(num_reqs: int) -> int:
    """Returns the place of a number of requests among the powers of the square root of two, rounded up: of 256 running
    requests a few read prompts, and the step of the others belongs to the same place.

    >>> [place_of(count) for count in (1, 2, 3, 4, 5, 6, 7, 13, 16, 17)]
    [0, 2, 4, 4, 5, 6, 6, 8, 8, 9]
    """
    return ceil(2 * log2(max(1, num_reqs)))


@inlined
def size_at(place: int) -> float:
    """Returns the number of requests that this place stands for.

    >>> [place_of(int(size_at(place))) for place in range(0, 20, 2)] == list(range(0, 20, 2))
    True
    """
    return float(2 ** (place / 2))


class StepTimes:
    """Chooses the draft length of each step from the records.

    Args:
        lengths: to choose from, the first one 0.
        has_tree: whether the last length is a whole tree, and the others are chains.
        trims: whether the target verifies only the tokens that pay off; a longer draft of unknown time then counts as
            no slower.
    """

    def __init__(self, lengths: Sequence[int], has_tree: bool = False, trims: bool = False):
        self.lengths, self.trims = tuple(lengths), trims
        times = np.zeros((NUM_SIZES, len(lengths), 1 + MIXED))  # the columns of usual.py, and MIXED
        outcomes = np.zeros((len(lengths) - 1, 3))  # by stretch, or tree: entered, accepted, wholly accepted
        self._arrays = np.array(lengths), times, outcomes, np.array([inf if trims else ROOM, has_tree], float)
        # With the whole share, V2's lookup loses 0.8 % in a play.
        self._trials, self._num_trials = Trials(EXPLORE_SHARE / 2), 0

    def add(self, num_reqs: int, k: int, ms: float, emitted: Sequence[int], share: float = 1.0) -> None:
        """Learns from a step that was planned with k, one of `lengths`. The step took `ms` after the previous one (nan
        if it waited), and emitted 1 to k + 1 tokens for each decoding request. Decoding requests have the share `share`
        of its tokens."""
        at = self.lengths.index(k)
        _add(num_reqs, at, ms, share, np.array(emitted, np.int64), *self._arrays)

    def choose(self, num_reqs: int, num_lengths: int = NUM_SIZES) -> int:
        """Returns the number of tokens to draft for each request, among the first num_lengths of `lengths`: the best
        one, or another one in a trial."""
        limits = num_reqs, min(num_lengths, len(self.lengths)), self._num_trials
        choice: tuple[int, float, int, float] = _choose(*limits, *self._arrays)
        best, best_ms, other, lost_ms = choice
        if not self._trials.due("lengths", lost_ms, best_ms):
            return self.lengths[best]
        self._num_trials += 1
        return self.lengths[other]


_times_types = types.int64[::1], types.float64[:, :, ::1]  # lengths, and times
_shape_type = types.float64[::1]  # room in tokens, and whether the last length is a tree's
_table_types = *_times_types, types.float64[:, ::1], _shape_type  # with the outcomes


@inlined
def _relative_ms(num_tokens: float, shape: Any) -> float:
    return float(1 + num_tokens / shape[0])


@inlined
def _cell_ms(cell: Any) -> float:
    """Returns the time of steps that only decoded, otherwise of mixed steps; 0: unknown."""
    return float(cell[MS] if cell[COUNT] >= FEW else cell[MIXED])


@inlined
def _guess(num_reqs: int, at: int, lengths: Any, times: Any, shape: Any) -> float:
    """Estimates the time from the known step with the nearest number of tokens."""
    tokens, nearest = num_reqs * (1 + lengths[at]), inf
    guess = _relative_ms(tokens, shape)
    for place, other in np.ndindex(times.shape[:2]):
        ms = _cell_ms(times[place, other])
        if ms == 0:
            continue
        its_tokens = size_at(place) * (1 + lengths[other])
        distance = abs(log(its_tokens / tokens))
        if distance < nearest:
            nearest, guess = distance, ms * _relative_ms(tokens, shape) / _relative_ms(its_tokens, shape)
    return float(guess)


@compiled(types.float64[::1](types.int64, *_times_types, _shape_type))
def _expected_ms(num_reqs: int, lengths: Any, times: Any, shape: Any) -> Any:
    expected, weights, place = np.empty(len(lengths)), np.ones(len(lengths)), place_of(num_reqs)
    for at in range(len(lengths)):
        cell = times[place, at]
        ms, count = _cell_ms(cell), cell[COUNT]
        if ms == 0:
            guess, weights[at] = _guess(num_reqs, at, lengths, times, shape), SHARE
            ms = min(cell[MS], guess) if count else guess
        expected[at] = ms
    return never_less(expected, weights)


@inlined
def _run(accept_prob: float, length: int) -> float:
    """Returns the expected number of accepted tokens of a draft with this acceptance probability at each place."""
    return accept_prob * (1 - accept_prob**length) / (1 - accept_prob)


@inlined
def _survive(tokens: Any, survival: Any, lengths: Any, outcomes: Any, has_tree: bool) -> None:
    """Writes, [L] each, the expected tokens of a request and the probability that its whole draft is accepted. A
    stretch without a record has the probability of the previous stretch. A tree, in which tokens do not follow each
    other, has a record of all its nodes, and starts with the record of the longest chain."""
    tokens[0], survival[0], accept_prob = 1.0, 1.0, GOOD_ACCEPTANCE
    for at in range(len(outcomes)):
        places, (entered, accepted, whole) = lengths[at + 1] - lengths[at], outcomes[at]
        scale = survival[at] / (entered + GUESS_WEIGHT)
        tokens[at + 1] = tokens[at] + scale * (accepted + GUESS_WEIGHT * _run(accept_prob, places))
        survival[at + 1] = scale * (whole + GUESS_WEIGHT * accept_prob**places)
        accept_prob = min(WHOLE, (survival[at + 1] / survival[at]) ** (1 / places))
    if has_tree:
        entered, accepted = outcomes[-1, :2]
        tokens[-1] = 1 + (accepted + GUESS_WEIGHT * (tokens[-2] - 1)) / (entered + GUESS_WEIGHT)
        survival[-1] = 0.0


@compiled(
    types.Tuple((types.int64, types.float64, types.int64, types.float64))(
        types.int64, types.int64, types.int64, *_table_types
    )
)
def _choose(
    num_reqs: int, num_lengths: int, num_trials: int, lengths: Any, times: Any, outcomes: Any, shape: Any
) -> tuple[int, float, int, float]:
    """Returns the index of the best of the first lengths and its ms; and a length to try, with the ms that the trial
    costs."""
    ms, (tokens, survival) = _expected_ms(num_reqs, lengths, times, shape), np.empty((2, len(lengths)))
    has_tree = shape[1] > 0
    _survive(tokens, survival, lengths, outcomes, has_tree)
    rates = (tokens / ms)[:num_lengths]
    best = np.flatnonzero(rates >= TIE * rates.max())[-1]
    last = num_lengths - 1
    others = 0, best - 1, min(best + 1, last), last
    other = others[num_trials % len(others)]
    if best == 0:
        other = 1 + rates[1:].argmax() if last else 0
    return best, ms[best], other, max(0.0, ms[other] - tokens[other] / rates[best])


@compiled(types.void(types.int64, types.int64, types.float64, types.float64, types.int64[::1], *_table_types))
def _add(
    num_reqs: int, at: int, ms: float, share: float, emitted: Any, lengths: Any, times: Any, outcomes: Any, shape: Any
) -> None:
    """Learns from a step."""
    cell, has_tree = times[place_of(num_reqs), at], shape[1] > 0
    if share == 1 and ms == ms:
        add_ms(cell, ms)
    elif 2 * num_reqs >= ROOM and ms == ms:  # the time of a step with this number of requests depends on its tokens
        known = cell[MIXED]
        cell[MIXED] += (SHARE if known else 1.0) * (min(share * ms, OUTLIER_RATIO * (known or inf)) - known)
    if len(emitted) == 0:
        return
    is_tree, decay = has_tree and at == len(outcomes), SHARED_DECAY if has_tree else 1 - SHARE
    if has_tree:
        outcomes[-1] *= SHARED_DECAY
        if is_tree:
            outcomes[-1, 0] += len(emitted)
            outcomes[-1, 1] += np.sum(emitted - 1)
    for stretch in range(len(outcomes) - has_tree):
        start, end = lengths[stretch], lengths[stretch + 1]
        is_drafted = stretch < at and not is_tree
        outcomes[stretch] *= decay if is_drafted else SHARED_DECAY
        for count in emitted if is_drafted else emitted[:0]:
            if count > start:
                outcomes[stretch, 0] += 1
                outcomes[stretch, 1] += min(count - 1 - start, end - start)
                outcomes[stretch, 2] += count > end
