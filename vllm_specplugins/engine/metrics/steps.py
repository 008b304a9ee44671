"""Counts steps that only decode by shape: the number of requests, their mean context and the longest draft, in buckets.

The scheduler knows the outcome of a step, and the worker exports metrics. `StepWatch` counts steps in the scheduler,
and from time to time a step carries the counts to the worker's `StepTotals`. A step's time begins when the outcome of
the previous step arrives, and ends with its outcome; it includes the drafting for the next step.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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


Shape = tuple[int, ...]  # the index of each size among its BOUNDS


def shape_of(num_reqs: int, context: float, longest: int) -> Shape:
    """Returns the index of the least bound that is not below each size.

    >>> labels_of(shape_of(3, 700.5, 31)), labels_of(shape_of(300, 0, 0))
    (('4', '2048', '32'), ('more', '512', '0'))
    """
    return bisect_left(BOUNDS[0], num_reqs), bisect_left(BOUNDS[1], context), bisect_left(BOUNDS[2], longest)


def labels_of(shape: Shape) -> tuple[str, ...]:
    return tuple(labels[place] for labels, place in zip(_LABELS, shape, strict=True))


@dataclass(slots=True)
class _Steps:
    """Sums over steps of one shape."""

    num_tokens: int = 0
    draft_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)  # of each step that follows another one
    by_graph: Counter[Any] = field(default_factory=Counter)  # steps, by vLLM's record of their CUDA graph
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)  # requests, by drafted and emitted tokens

    def series(self, shape: Shape) -> Iterator[tuple[str, float]]:
        labels = labels_of(shape)
        yield key("shape_tokens", *labels), self.num_tokens
        if self.seconds:
            yield key("shape_draft_time_seconds", *labels), self.draft_seconds
        for mode, num in self.by_graph.items():
            yield key("shape_steps", *labels, mode.rpartition(".")[2].lower()), num
        for (length, emitted), num in self.outcomes.items():
            accepted = max(0, emitted - 1)
            position = WHOLE if accepted >= length else 1 << accepted.bit_length() >> 1
            yield key("shape_first_rejections", *labels, position), num


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
        self._steps, sums = [], defaultdict[Shape, _Steps](_Steps)
        counts, times = defaultdict[str, float](float), list[tuple[str, tuple[float, ...]]]()
        try:
            for step in steps * (not self._has_failed):
                if reason := self._count(step, sums):
                    counts[key("undrafted_steps", reason)] += 1
            for shape, its in sums.items():
                for series, num in its.series(shape):
                    counts[series] += num
                if its.seconds:
                    times.append((key("shape_time_seconds", *labels_of(shape)), tuple(its.seconds)))
        except Exception as error:
            self._has_failed = True
            logger.error("The engine stops counting steps by shape (%s). Requests continue.", cause_text(error))
        return StepSums(tuple(counts.items()), tuple(times))

    def _count(self, step: Any, sums: Mapping[Shape, _Steps]) -> str | None:
        """Counts a step, unless it reads prompts. Returns the reason why it verified no draft, if any."""
        if step is None:
            self._at = nan
            return None
        now, scheduled, (index, cuda_graph_stat, (draft_seconds, next_reason)), num_sampled, chosen, verified = step
        before, self._at, reason, self._reason = self._at, now, self._reason, next_reason
        drafts, num_reqs = scheduled.scheduled_spec_decode_tokens, len(scheduled.num_scheduled_tokens)
        lengths = list(map(len, drafts.values()))
        decoded = num_reqs + sum(lengths)
        if not num_reqs or scheduled.scheduled_new_reqs or scheduled.total_num_scheduled_tokens != decoded:
            return None
        if not lengths:
            reason = "scheduler" if chosen == 0 else reason or "no draft"
        else:
            reason = "trimmed" if verified == 0 else None
        longest, is_whole = max(lengths, default=0), not verified or verified >= sum(lengths)
        if not is_whole:  # at most this many; the host does not know which tokens
            longest = min(longest, verified)
        cached_request_data = scheduled.scheduled_cached_reqs
        context = sum(cached_request_data.num_computed_tokens) / num_reqs
        its = sums[shape_of(num_reqs, context, 0 if reason else longest)]
        its.by_graph[cuda_graph_stat.runtime_mode if cuda_graph_stat else "unknown"] += 1
        its.num_tokens += sum(num_sampled)
        if not isnan(now - before):
            its.draft_seconds += draft_seconds
            its.seconds.append(now - before)
        if reason is None and is_whole:
            its.outcomes.update(zip(lengths, map(num_sampled.__getitem__, map(index.__getitem__, drafts)), strict=True))
        return reason


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
