"""Chooses one draft length for all requests of a step, from a table of measured step times.

What a step takes is kept by number of requests and draft length k; steps of other sizes with about as many tokens say
what one that was not tried yet may take, and a longer draft never counts as cheaper than a shorter one. What a step
brings is kept by place in the draft: a draft of k tokens says what all shorter ones would have brought. Chosen is the k
with the most tokens a ms. Where each step takes prompts in, too, steps of many requests count by their share of
tokens, until purer ones are known. Pure arithmetic: times come in, nothing is measured here.
"""

from collections.abc import Sequence
from math import inf, log
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.kernels.compiled import compiled, inlined

CLIFF = 512  # tokens of a step, by default; above them vLLM captures no graph
CLIFF_COST = 1.5  # of a step above it, before it is known
ROOM = 256  # tokens that make a step twice as long as none, before it is known
DECAY = 0.85  # of what drafts bring, by step that tells
MODEL_DECAY = 0.97  # beside a tree: a model drafts, whose worth changes slowly
FORGOTTEN = 0.99  # by step that does not: text changes
GUESS, GUESS_WEIGHT = 0.75, 0.25  # a token's acceptance probability, as if so many requests had shown it
WHOLE = 0.95  # that of tokens after a draft that was accepted whole
MOST_SAVED = 4.0  # steps, for trials
TRIAL_EVERY, TRIAL_SHARE = 8, 0.005  # steps between trials, at the least, and of the time, at the most
MAX_DEVIATIONS = 3.0  # standard deviations
TIE = 0.995  # of two that are as good the longer one: it sees more
OUTLIER_RATIO = 3.0  # what takes so many times what was expected was held up: times err upwards alone
MAX_OUTLIERS = 3  # in a row; a fourth one says that steps have become slower
UNSURE = 3  # steps, before which a time may be that of a hiccup
SHARE = 0.1  # of a time that is known, by step

MOST_SIZES = 34  # of batches, see size_of


def lengths_up_to(max_num_draft: int, longest_chain: int = 0) -> tuple[int, ...]:
    """The lengths that are tried of drafts of at most so many tokens; or of chains, and then a whole tree.

    >>> lengths_up_to(31), lengths_up_to(5), lengths_up_to(1), lengths_up_to(15, 6)
    ((0, 1, 2, 4, 8, 16, 31), (0, 1, 2, 4, 5), (0, 1), (0, 1, 2, 4, 6, 15))
    """
    if 0 < longest_chain < max_num_draft:
        return *lengths_up_to(longest_chain), max_num_draft
    powers = (1 << power for power in range(max_num_draft.bit_length()))
    return 0, *(length for length in powers if length < max_num_draft), max_num_draft


@inlined
def size_of(num_reqs: int) -> tuple[int, int]:
    """The number of requests that stands for this one, and its place among such numbers.

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
    """See the module. L: lengths.

    Args:
        max_num_draft: K.
        longest_chain: 0, or of how many tokens at the most a draft is one, where that of K is a tree.
        cliff: tokens of the largest step that has a graph.
        trims: whether no more of a draft is verified than what pays. Then a step takes as long with a longer one,
            before that is known.
    """

    def __init__(self, max_num_draft: int, longest_chain: int = 0, cliff: float = CLIFF, trims: bool = False):
        self.lengths = lengths_up_to(max_num_draft, longest_chain)
        shape = MOST_SIZES, 2, len(self.lengths)  # by size, whether that is above the cliff, and length
        self._times = np.zeros((*shape, 4))  # ms, and of how many steps; slow ones in a row, so far; ms of mixed steps
        self._brought = np.zeros((len(self.lengths) - 1, 3))  # by stretch, or tree: entered, accepted, whole
        has_tree = 0 < longest_chain < max_num_draft
        self._shape, self._cliff = np.array([ROOM, cliff, has_tree], float), cliff  # of unknown times
        self._arrays = np.array(self.lengths), self._times, self._brought, self._shape
        self.expect(trims)
        self._follows = 0, 0.0  # up to which length to go on, by index, and what that should bring
        self._saved_ms, self._num_steps, self._num_trials = 0.0, 0, 0  # for trials, since the last one, so far

    def expect(self, trims: bool) -> None:
        """See the class."""
        self._shape[:2] = (inf, inf) if trims else (ROOM, self._cliff)

    def add(self, num_reqs: int, k: int, ms: float, emitted: Sequence[int], share: float = 1.0) -> None:
        """A step is over.

        Args:
            k: the draft length that it was planned with, one of `lengths`.
            ms: from the step before to this one; nan: it waited.
            emitted: tokens that each request that decodes got, 1 to k + 1.
            share: of its tokens that decoding had.
        """
        at = self.lengths.index(k)
        self._follows = _add(num_reqs, at, ms, share, np.array(emitted, np.int64), *self._arrays)

    def choose(self, num_reqs: int) -> int:
        """How many tokens to draft for each of so many requests; now and then others, to see what that would bring."""
        found: tuple[int, float, int, float] = _choose(num_reqs, self._num_trials, *self._follows, *self._arrays)
        best, best_ms, other, lost_ms = found
        self._saved_ms = min(self._saved_ms + TRIAL_SHARE * best_ms, MOST_SAVED * best_ms)
        self._num_steps += 1
        if self._num_steps < TRIAL_EVERY or lost_ms > self._saved_ms:
            return self.lengths[best]
        self._saved_ms, self._num_steps, self._num_trials = self._saved_ms - lost_ms, 0, self._num_trials + 1
        return self.lengths[other]


_known = types.int64[::1], types.float64[:, :, :, ::1]  # lengths, and times: see StepTimes.__init__
_shape = types.float64[::1]  # room and cliff, in tokens, and whether the last length is a tree's
_table = types.float64[:, ::1], _shape  # what drafts brought


@inlined
def _shaped(num_tokens: float, shape: Any) -> float:
    """ms of a step of so many tokens, but for a factor, before any is known."""
    return float(1 + num_tokens / shape[0]) * (CLIFF_COST if num_tokens > shape[1] else 1.0)


@inlined
def _known_ms(known: Any) -> float:
    """Of steps that do nothing but decoding, or else of mixed ones; 0: of neither."""
    return float(known[0] if known[1] >= UNSURE else known[3])


@inlined
def _guess(num_reqs: int, at: int, lengths: Any, times: Any, shape: Any) -> float:
    """By what steps took that had about as many tokens, of as many requests if there were some."""
    tokens, (_, own_place) = num_reqs * (1 + lengths[at]), size_of(num_reqs)
    guess, nearest, has_own = _shaped(tokens, shape), inf, False
    for place, is_above, other in np.ndindex(times.shape[:3]):
        is_own = place == own_place
        ms = _known_ms(times[place, is_above, other])
        if ms == 0 or (has_own and not is_own):
            continue
        size = (4 if place % 2 == 0 else 3) * 2.0 ** ((place + 1) // 2 - 2)
        its_tokens = size * (1 + lengths[other])
        its_tokens = max(its_tokens, shape[1] + 1.0) if is_above else min(its_tokens, shape[1])
        distance = abs(log(its_tokens / tokens))
        if distance < nearest or (is_own and not has_own):
            nearest, has_own = distance, is_own
            guess = ms * _shaped(tokens, shape) / _shaped(its_tokens, shape)
    return float(guess)


@compiled(types.float64[::1](types.float64[::1], types.float64[::1]))
def never_less(values: Any, weights: Any) -> Any:
    """What is nearest to these values and never falls: neighbours that do have their mean.

    >>> never_less(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    found = np.empty(len(values))
    pools, starts, num_pools = np.empty(len(values)), np.empty(len(values), np.int64), 0  # weights of equal ones
    for at in range(len(values)):
        start, value, weight = at, values[at], weights[at]
        while num_pools and found[starts[num_pools - 1]] >= value:
            num_pools -= 1
            start, its = starts[num_pools], pools[num_pools]
            value, weight = (value * weight + found[start] * its) / (weight + its), weight + its
        starts[num_pools], pools[num_pools] = start, weight
        found[start : at + 1] = value
        num_pools += 1
    return found


@compiled(types.float64[::1](types.int64, *_known, _shape))
def _expected_ms(num_reqs: int, lengths: Any, times: Any, shape: Any) -> Any:
    """Of a step, by length: never less than of a shorter one, neighbours that say otherwise have their mean."""
    found, weights, place = np.empty(len(lengths)), np.ones(len(lengths)), size_of(num_reqs)[1]
    for at, length in enumerate(lengths):
        known = times[place, int(num_reqs * (1 + length) > shape[1]), at]
        ms, count = _known_ms(known), known[1]
        if ms == 0:
            guess, weights[at] = _guess(num_reqs, at, lengths, times, shape), 0.5 if count else 0.1
            ms = min(known[0], guess) if count else guess
        found[at] = ms
    return never_less(found, weights)


@inlined
def _run(accept_prob: float, length: int) -> float:
    """Tokens of a draft that are accepted, where each is with this probability if those before it were."""
    return accept_prob * (1 - accept_prob**length) / (1 - accept_prob)


@inlined
def _survive(tokens: Any, survival: Any, lengths: Any, brought: Any, has_tree: bool) -> None:
    """By length, tokens of a request, and how likely all drafted ones are accepted.

    Where nothing is known of a token it is as likely as those before it: right all along, or not at all. A tree, whose
    tokens do not follow each other, has a record of its own, and is then as good as the longest chain.
    """
    tokens[0], survival[0], accept_prob = 1.0, 1.0, GUESS
    for at in range(len(brought)):
        places, (entered, accepted, whole) = lengths[at + 1] - lengths[at], brought[at]
        scale = survival[at] / (entered + GUESS_WEIGHT)
        tokens[at + 1] = tokens[at] + scale * (accepted + GUESS_WEIGHT * _run(accept_prob, places))
        survival[at + 1] = scale * (whole + GUESS_WEIGHT * accept_prob**places)
        accept_prob = min(WHOLE, (survival[at + 1] / survival[at]) ** (1 / places))
    if has_tree:
        entered, accepted = brought[-1, :2]
        tokens[-1] = 1 + (accepted + GUESS_WEIGHT * (tokens[-2] - 1)) / (entered + GUESS_WEIGHT)
        survival[-1] = 0.0


@compiled(
    types.Tuple((types.int64, types.float64, types.int64, types.float64))(
        types.int64, types.int64, types.int64, types.float64, *_known, *_table
    )
)
def _choose(
    num_reqs: int, num_trials: int, up_to: int, follows: float, lengths: Any, times: Any, brought: Any, shape: Any
) -> tuple[int, float, int, float]:
    """The best length, by index, and its ms; one to try, and what that costs, in ms."""
    ms, (tokens, survival) = _expected_ms(num_reqs, lengths, times, shape), np.empty((2, len(lengths)))
    has_tree = shape[2] > 0
    _survive(tokens, survival, lengths, brought, has_tree)
    tokens[up_to] = max(tokens[up_to], follows)
    rates = tokens / ms
    best = np.flatnonzero(rates >= TIE * rates.max())[-1]
    most = len(lengths) - 1
    other = (0, best - 1, best + 1, most)[num_trials % (2 if best == most else 4 if has_tree else 3)]
    if best == 0:
        other = 1 + rates[1:].argmax()
    return best, ms[best], other, max(0.0, ms[other] - tokens[other] / rates[best])


@inlined
def _add_time(known: Any, ms: float) -> None:
    """Times err upwards: of the first few the least counts."""
    if known[1] < UNSURE:
        known[0] = min(known[0], ms) if known[1] else ms
        known[1] += 1
        return
    known[2] = known[2] + 1 if ms > OUTLIER_RATIO * known[0] else 0
    if 0 < known[2] <= MAX_OUTLIERS:
        return
    known[0] += (1.0 if known[2] else SHARE) * (ms - known[0])
    known[2] = 0


@compiled(
    types.Tuple((types.int64, types.float64))(
        types.int64, types.int64, types.float64, types.float64, types.int64[::1], *_known, *_table
    )
)
def _add(
    num_reqs: int, at: int, ms: float, share: float, emitted: Any, lengths: Any, times: Any, brought: Any, shape: Any
) -> tuple[int, float]:
    """Takes a step in. Drafts that were accepted whole far more often than the record says are followed by longer ones:
    up to which length, by index, and what that should bring."""
    known, has_tree = times[size_of(num_reqs)[1], int(num_reqs * (1 + lengths[at]) > shape[1]), at], shape[2] > 0
    if share == 1 and ms == ms:
        _add_time(known, ms)
    elif 2 * num_reqs >= ROOM and ms == ms:  # so many that each token takes its time
        known[3] += (SHARE if known[3] else 1.0) * (min(share * ms, OUTLIER_RATIO * (known[3] or inf)) - known[3])
    if len(emitted) == 0:
        return 0, 0.0
    tokens, survival = np.empty((2, len(lengths)))
    _survive(tokens, survival, lengths, brought, has_tree)
    whole, expected, follows = np.mean(emitted == lengths[at] + 1), survival[at], (0, 0.0)
    if at > 0 and whole > expected + MAX_DEVIATIONS * (expected * (1 - expected) / len(emitted)) ** 0.5:
        up_to = min(at + 1, len(lengths) - 1)
        follows = up_to, 1 + whole * (lengths[at] + _run(WHOLE, lengths[up_to] - lengths[at]))
    is_tree, decay = has_tree and at == len(brought), MODEL_DECAY if has_tree else DECAY
    if has_tree:
        brought[-1] *= decay if is_tree else FORGOTTEN
        if is_tree:
            brought[-1, 0] += len(emitted)
            brought[-1, 1] += np.sum(emitted - 1)
    for stretch in range(len(brought) - has_tree):
        start, end = lengths[stretch], lengths[stretch + 1]
        tells = stretch < at and not is_tree
        brought[stretch] *= decay if tells else FORGOTTEN
        for count in emitted if tells else emitted[:0]:
            if count > start:
                brought[stretch, 0] += 1
                brought[stretch, 1] += min(count - 1 - start, end - start)
                brought[stretch, 2] += count > end
    return follows
