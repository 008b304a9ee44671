"""Counts steps that only decode by shape: the number of requests, their mean context and the longest draft, in buckets.

The scheduler knows the outcome of a step, and the worker exports metrics. `StepWatch` counts steps in the scheduler,
and from time to time a step carries the counts to the worker's `StepTotals`. A step's time begins when the outcome of
the previous step arrives, and ends with its outcome; it includes the drafting for the next step.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from math import isnan, nan
from time import perf_counter
from typing import Any

from vllm_specplugins.engine.messages import StepSums, facts_of
from vllm_specplugins.engine.metrics.names import key
from vllm_specplugins.isolation.faults import cause_text

logger = logging.getLogger("vllm.specplugins")

MORE, WHOLE = "more", "none"  # labels: above the last bound; no draft token was rejected
BOUNDS = ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768, 131072), (0, 1, 2, 4, 8, 16, 32, 64))  # of a shape's labels
BURST = 32  # steps that are counted together
_LABELS = tuple((*map(str, bounds), MORE) for bounds in BOUNDS)
Shape = tuple[str, ...]  # its labels


def shape_of(num_reqs: int, context: float, longest: int) -> Shape:
    """Returns the least bound that is not below each size.

    >>> shape_of(3, 700.5, 31), shape_of(300, 0, 0)
    (('4', '2048', '32'), ('more', '512', '0'))
    """
    places = bisect_left(BOUNDS[0], num_reqs), bisect_left(BOUNDS[1], context), bisect_left(BOUNDS[2], longest)
    return _LABELS[0][places[0]], _LABELS[1][places[1]], _LABELS[2][places[2]]


class _Burst:
    """Counts of some steps, by a metric and its labels."""

    def __init__(self) -> None:
        self.counts = defaultdict[tuple[str, ...], float](float)
        self.seconds = defaultdict[Shape, list[float]](list)  # of each step that follows another one
        self.outcomes = defaultdict[Shape, Counter[tuple[int, int]]](Counter)  # requests, by drafted and emitted tokens

    def sums(self) -> StepSums:
        for shape, outcomes in self.outcomes.items():
            for (length, emitted), num in outcomes.items():
                accepted = max(0, emitted - 1)
                position = WHOLE if accepted >= length else f"{1 << accepted.bit_length() >> 1}"
                self.counts["shape_first_rejections", *shape, position] += num
        counts = ((key(*series), num) for series, num in self.counts.items())
        seconds = ((key("shape_time_seconds", *shape), tuple(times)) for shape, times in self.seconds.items())
        return StepSums(tuple(counts), tuple(seconds))


class StepWatch:
    """Counts steps in groups, since code that runs once per step has a cold cache. A failure ends the counting and
    affects no request."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock, self._at, self._reason, self._has_failed = clock, nan, None, False
        self._steps: list[Any] = []  # outcomes' arrival times, and arguments of `add`; None: no request

    def add(self, scheduled: Any, output: Any, num_sampled: Any, chosen: Any = None, verified: Any = None) -> None:
        """Adds a step, with the sampled tokens of each row, the draft length that the scheduler chose for it, and its
        verified draft tokens if drafts were trimmed."""
        told = facts_of(output)
        drafting = told.draft_seconds, told.undrafted
        facts = output.req_id_to_index, output.cudagraph_stats, drafting  # the output has tensors, too
        self._steps.append((self._clock(), scheduled, facts, num_sampled, chosen, verified))

    def pause(self) -> None:
        """Stops the clock while there are no requests."""
        self._steps.append(None)

    def taken(self) -> StepSums | None:
        """Returns the counts since the last call, if they are many or there is no request."""
        steps = self._steps
        if not steps or (len(steps) < BURST and steps[-1] is not None):
            return None
        self._steps, burst = [], _Burst()
        try:
            for step in steps * (not self._has_failed):
                self._count(step, burst)
            return burst.sums()
        except Exception as error:
            self._has_failed = True
            logger.error("The engine stops counting steps by shape (%s). Requests continue.", cause_text(error))
        return StepSums()

    def _count(self, step: Any, burst: _Burst) -> None:
        """Counts a step, unless it reads prompts."""
        if step is None:
            self._at = nan
            return
        now, scheduled, (index, cuda_graph_stat, (draft_seconds, next_reason)), num_sampled, chosen, verified = step
        before, self._at, reason, self._reason = self._at, now, self._reason, next_reason
        drafts, num_reqs = scheduled.scheduled_spec_decode_tokens, len(scheduled.num_scheduled_tokens)
        lengths = list(map(len, drafts.values()))
        decoded = num_reqs + sum(lengths)
        if not num_reqs or scheduled.scheduled_new_reqs or scheduled.total_num_scheduled_tokens != decoded:
            return
        if not lengths:
            reason = "scheduler" if chosen == 0 else reason or "no draft"
        else:
            reason = "trimmed" if verified == 0 else None
        longest, is_whole = max(lengths, default=0), not verified or verified >= sum(lengths)
        if not is_whole:  # at most this many; the host does not know which tokens
            longest = min(longest, verified)
        cached_request_data = scheduled.scheduled_cached_reqs
        context = sum(cached_request_data.num_computed_tokens) / num_reqs
        shape = shape_of(num_reqs, context, 0 if reason else longest)
        graph = cuda_graph_stat.runtime_mode.rpartition(".")[2].lower() if cuda_graph_stat else "unknown"
        burst.counts["shape_steps", *shape, graph] += 1
        burst.counts["shape_tokens", *shape] += sum(num_sampled)
        if not isnan(now - before):
            burst.counts["shape_draft_time_seconds", *shape] += draft_seconds
            burst.seconds[shape].append(now - before)
        if reason is not None:
            burst.counts["undrafted_steps", reason] += 1
        elif is_whole:
            emitted = map(num_sampled.__getitem__, map(index.__getitem__, drafts))
            burst.outcomes[shape].update(zip(lengths, emitted, strict=True))


class StepTotals:
    """Running totals by series. `observe` adds a time to a histogram."""

    def __init__(self, observe: Callable[[str, float], None]):
        self._observe, self.counts = observe, defaultdict[str, float](float)

    def add(self, more: StepSums | None) -> None:
        """Adds the counts of a StepWatch."""
        if more is None:
            return
        for series, num in more.counts:
            self.counts[series] += num
        for series, times in more.seconds:
            for seconds in times:
                self._observe(series, seconds)
