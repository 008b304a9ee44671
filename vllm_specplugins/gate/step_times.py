"""Chooses one draft length for all requests of a step, from measured step times.

    length = argmax of tokens(length) / ms(length)

`ms` is recorded by number of requests and length. An unknown time is estimated from steps with a similar number of
tokens, and a longer draft never counts as cheaper than a shorter one. `tokens` is recorded by draft position, since a
draft also shows the gain of each shorter draft. From time to time a step tries another length. If every step also
processes prompts, a step of many requests is weighted by the requests' share of its tokens until a purer step is known.
The caller measures all times. R: requests, L: lengths.
"""

from collections.abc import Sequence
from math import inf, log
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.kernels.compiled import compiled, inlined

CLIFF = 512  # tokens of the largest step with a CUDA graph in vLLM, by default
CLIFF_COST = 1.5  # time relative to a step with a graph, before it is measured
ROOM = 256  # tokens that double the time of a step, before it is measured
DECAY = 0.85  # decay of a position's gain per step that drafts there, since text changes
MODEL_DECAY = 0.97  # the same for a tree: its model's acceptance changes slowly
FORGOTTEN = 0.99  # decay per step that does not draft there
GUESS, GUESS_WEIGHT = 0.75, 0.25  # prior of a token's acceptance probability, and its weight in requests
WHOLE = 0.95  # acceptance probability of tokens after a wholly accepted draft
MAX_SAVED = 4.0  # largest time to spend on trials, in steps
TRIAL_EVERY, TRIAL_SHARE = 8, 0.005  # fewest steps between trials, and largest share of the time for them
MAX_DEVIATIONS = 3.0  # standard deviations above which wholly accepted drafts indicate a new kind of text
TIE = 0.995  # share of the best rate: the longest length above it is chosen, since it informs more
OUTLIER_RATIO = 3.0  # times the expected time: such a step is an outlier, since delays only lengthen steps
MAX_OUTLIERS = 3  # outliers in a row; a fourth one shows that steps have become slower
UNSURE = 3  # number of steps before which a time may be an outlier
SHARE = 0.1  # weight of a step in a known time
NUM_SIZES = 34  # places of size_of


def lengths_up_to(max_num_draft: int, longest_chain: int = 0) -> tuple[int, ...]:
    """Returns the lengths to choose from; with `longest_chain` these are the lengths of chains, and then a whole tree.

    >>> lengths_up_to(31), lengths_up_to(5), lengths_up_to(1), lengths_up_to(15, 6)
    ((0, 1, 2, 4, 8, 16, 31), (0, 1, 2, 4, 5), (0, 1), (0, 1, 2, 4, 6, 15))
    """
    if 0 < longest_chain < max_num_draft:
        return *lengths_up_to(longest_chain), max_num_draft
    powers = (1 << power for power in range(max_num_draft.bit_length()))
    return 0, *(length for length in powers if length < max_num_draft), max_num_draft


@inlined
def size_of(num_reqs: int) -> tuple[int, int]:
    """Returns the power of two, or three quarters of one, that represents this number of requests, and its index.

    >>> [size_of(count)[0] for count in (1, 2, 3, 4, 5, 6, 7, 13, 16, 17)]
    [1, 2, 3, 4, 6, 6, 8, 16, 16, 24]
    """
    size, place = 1, 0
    while size < num_reqs:
        size, place = 2 * size, place + 2
    if num_reqs <= size * 3 // 4:
        size, place = size * 3 // 4, place - 1
    return size, place


class StepTimes:
    """Chooses the draft length of each step from the records.

    Args:
        longest_chain: 0; or for trees of max_num_draft tokens, the length up to which a draft is a chain.
        cliff: tokens of the largest step with a CUDA graph.
        trims: whether the target verifies only the tokens that pay off; a longer draft of unknown time then counts as
            no slower.
    """

    def __init__(self, max_num_draft: int, longest_chain: int = 0, cliff: float = CLIFF, trims: bool = False):
        self.lengths = lengths_up_to(max_num_draft, longest_chain)
        shape = NUM_SIZES, 2, len(self.lengths)  # by size, side of the cliff, and length
        self._times = np.zeros((*shape, 4))  # ms; steps it is from; outliers in a row; ms by mixed steps
        self._outcomes = np.zeros((len(self.lengths) - 1, 3))  # by stretch, or tree: entered, accepted, wholly accepted
        has_tree = 0 < longest_chain < max_num_draft
        self._shape, self._cliff = np.array([ROOM, cliff, has_tree], float), cliff  # of unknown times
        self._arrays = np.array(self.lengths), self._times, self._outcomes, self._shape
        self.expect(trims)
        self._follow = 0, 0.0  # index of a length to grow to, and its expected tokens
        self._saved_ms, self._num_steps, self._num_trials = (
            0.0,
            0,
            0,
        )  # ms saved for trials; steps since the last one; all steps

    def expect(self, trims: bool) -> None:
        self._shape[:2] = (inf, inf) if trims else (ROOM, self._cliff)

    def add(self, num_reqs: int, k: int, ms: float, emitted: Sequence[int], share: float = 1.0) -> None:
        """Learns from a step that was planned with k, one of `lengths`. The step took `ms` after the previous one (nan
        if it waited), and emitted 1 to k + 1 tokens for each decoding request. Decoding requests have the share `share`
        of its tokens."""
        at = self.lengths.index(k)
        self._follow = _add(num_reqs, at, ms, share, np.array(emitted, np.int64), *self._arrays)

    def choose(self, num_reqs: int, num_lengths: int = NUM_SIZES) -> int:
        """Returns the number of tokens to draft for each request, among the first num_lengths of `lengths`: the best
        one, or another one in a trial."""
        limits = num_reqs, min(num_lengths, len(self.lengths)), self._num_trials
        choice: tuple[int, float, int, float] = _choose(*limits, *self._follow, *self._arrays)
        best, best_ms, other, lost_ms = choice
        self._saved_ms = min(self._saved_ms + TRIAL_SHARE * best_ms, MAX_SAVED * best_ms)
        self._num_steps += 1
        if self._num_steps < TRIAL_EVERY or lost_ms > self._saved_ms:
            return self.lengths[best]
        self._saved_ms, self._num_steps, self._num_trials = self._saved_ms - lost_ms, 0, self._num_trials + 1
        return self.lengths[other]


_times_types = types.int64[::1], types.float64[:, :, :, ::1]  # lengths, and times
_shape_type = types.float64[::1]  # room and cliff, in tokens, and whether the last length is a tree's
_table_types = *_times_types, types.float64[:, ::1], _shape_type  # with the outcomes


@inlined
def _relative_ms(num_tokens: float, shape: Any) -> float:
    return float(1 + num_tokens / shape[0]) * (CLIFF_COST if num_tokens > shape[1] else 1.0)


@inlined
def _cell_ms(cell: Any) -> float:
    """Returns the time of steps that only decoded, otherwise of mixed steps; 0: unknown."""
    return float(cell[0] if cell[1] >= UNSURE else cell[3])


@inlined
def _guess(num_reqs: int, at: int, lengths: Any, times: Any, shape: Any) -> float:
    """Estimates the time from the known step with the nearest number of tokens, of the same size if there is one."""
    tokens, (_, size_place) = num_reqs * (1 + lengths[at]), size_of(num_reqs)
    guess, nearest, has_same = _relative_ms(tokens, shape), inf, False
    for place, is_above, other in np.ndindex(times.shape[:3]):
        is_same = place == size_place
        ms = _cell_ms(times[place, is_above, other])
        if ms == 0 or (has_same and not is_same):
            continue
        size = (4 if place % 2 == 0 else 3) * 2.0 ** ((place + 1) // 2 - 2)
        its_tokens = size * (1 + lengths[other])
        its_tokens = max(its_tokens, shape[1] + 1.0) if is_above else min(its_tokens, shape[1])
        distance = abs(log(its_tokens / tokens))
        if distance < nearest or (is_same and not has_same):
            nearest, has_same = distance, is_same
            guess = ms * _relative_ms(tokens, shape) / _relative_ms(its_tokens, shape)
    return float(guess)


@compiled(types.float64[::1](types.float64[::1], types.float64[::1]))
def never_less(values: Any, weights: Any) -> Any:
    """Returns the nearest non-decreasing values (isotonic regression): decreasing neighbours get their mean.

    >>> never_less(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    rising = np.empty(len(values))
    pools, starts, num_pools = np.empty(len(values)), np.empty(len(values), np.int64), 0  # weights of equal values
    for at in range(len(values)):
        start, value, weight = at, values[at], weights[at]
        while num_pools and rising[starts[num_pools - 1]] >= value:
            num_pools -= 1
            start, pool = starts[num_pools], pools[num_pools]
            value, weight = (value * weight + rising[start] * pool) / (weight + pool), weight + pool
        starts[num_pools], pools[num_pools] = start, weight
        rising[start : at + 1] = value
        num_pools += 1
    return rising


@compiled(types.float64[::1](types.int64, *_times_types, _shape_type))
def _expected_ms(num_reqs: int, lengths: Any, times: Any, shape: Any) -> Any:
    expected, weights, place = np.empty(len(lengths)), np.ones(len(lengths)), size_of(num_reqs)[1]
    for at, length in enumerate(lengths):
        cell = times[place, int(num_reqs * (1 + length) > shape[1]), at]
        ms, count = _cell_ms(cell), cell[1]
        if ms == 0:
            guess, weights[at] = _guess(num_reqs, at, lengths, times, shape), 0.5 if count else 0.1
            ms = min(cell[0], guess) if count else guess
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
    tokens[0], survival[0], accept_prob = 1.0, 1.0, GUESS
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
        types.int64, types.int64, types.int64, types.int64, types.float64, *_table_types
    )
)
def _choose(
    num_reqs: int, num_lengths: int, num_trials: int, up_to: int, follow: float,
    lengths: Any, times: Any, outcomes: Any, shape: Any,
) -> tuple[int, float, int, float]:  # fmt: skip
    """Returns the index of the best of the first lengths and its ms; and a length to try, with the ms that the trial
    costs."""
    ms, (tokens, survival) = _expected_ms(num_reqs, lengths, times, shape), np.empty((2, len(lengths)))
    has_tree = shape[2] > 0
    _survive(tokens, survival, lengths, outcomes, has_tree)
    tokens[up_to] = max(tokens[up_to], follow)
    rates = (tokens / ms)[:num_lengths]
    best = np.flatnonzero(rates >= TIE * rates.max())[-1]
    last = num_lengths - 1
    other = (0, best - 1, best + 1, last)[num_trials % (2 if best == last else 4 if has_tree else 3)]
    if best == 0:
        other = 1 + rates[1:].argmax() if last else 0
    return best, ms[best], other, max(0.0, ms[other] - tokens[other] / rates[best])


@inlined
def _add_time(cell: Any, ms: float) -> None:
    """Adds a time. Delays only lengthen steps, so the least of the first few times counts."""
    if cell[1] < UNSURE:
        cell[0] = min(cell[0], ms) if cell[1] else ms
        cell[1] += 1
        return
    cell[2] = cell[2] + 1 if ms > OUTLIER_RATIO * cell[0] else 0
    if 0 < cell[2] <= MAX_OUTLIERS:
        return
    cell[0] += (1.0 if cell[2] else SHARE) * (ms - cell[0])
    cell[2] = 0


@compiled(
    types.Tuple((types.int64, types.float64))(
        types.int64, types.int64, types.float64, types.float64, types.int64[::1], *_table_types
    )
)
def _add(
    num_reqs: int, at: int, ms: float, share: float, emitted: Any, lengths: Any, times: Any, outcomes: Any, shape: Any
) -> tuple[int, float]:
    """Learns from a step. If far more drafts were wholly accepted than the record predicts, returns the index of the
    length up to which the next draft grows, and its expected tokens."""
    cell, has_tree = times[size_of(num_reqs)[1], int(num_reqs * (1 + lengths[at]) > shape[1]), at], shape[2] > 0
    if share == 1 and ms == ms:
        _add_time(cell, ms)
    elif 2 * num_reqs >= ROOM and ms == ms:  # the time of a step with this number of requests depends on its tokens
        cell[3] += (SHARE if cell[3] else 1.0) * (min(share * ms, OUTLIER_RATIO * (cell[3] or inf)) - cell[3])
    if len(emitted) == 0:
        return 0, 0.0
    tokens, survival = np.empty((2, len(lengths)))
    _survive(tokens, survival, lengths, outcomes, has_tree)
    whole, expected, follow = np.mean(emitted == lengths[at] + 1), survival[at], (0, 0.0)
    if at > 0 and whole > expected + MAX_DEVIATIONS * (expected * (1 - expected) / len(emitted)) ** 0.5:
        up_to = min(at + 1, len(lengths) - 1)
        follow = up_to, 1 + whole * (lengths[at] + _run(WHOLE, lengths[up_to] - lengths[at]))
    is_tree, decay = has_tree and at == len(outcomes), MODEL_DECAY if has_tree else DECAY
    if has_tree:
        outcomes[-1] *= decay if is_tree else FORGOTTEN
        if is_tree:
            outcomes[-1, 0] += len(emitted)
            outcomes[-1, 1] += np.sum(emitted - 1)
    for stretch in range(len(outcomes) - has_tree):
        start, end = lengths[stretch], lengths[stretch + 1]
        is_drafted = stretch < at and not is_tree
        outcomes[stretch] *= decay if is_drafted else FORGOTTEN
        for count in emitted if is_drafted else emitted[:0]:
            if count > start:
                outcomes[stretch, 0] += 1
                outcomes[stretch, 1] += min(count - 1 - start, end - start)
                outcomes[stretch, 2] += count > end
    return follow
