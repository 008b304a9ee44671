"""Steps that only decode, by shape: the number of requests, their mean context and the longest draft, in buckets.

The scheduler knows the outcome of a step, and the worker exports metrics. `StepWatch` counts steps in the scheduler,
and from time to time a step carries the counts to the worker's `StepTotals`. A step's time begins when the outcome of
the previous step arrives, and ends with its outcome; it includes the drafting for the next step.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from math import isnan, nan
from time import perf_counter
from typing import Any

from vllm_specplugins.engine.metrics.names import SEPARATOR, TABLE, key
from vllm_specplugins.isolation.faults import cause_text

logger = logging.getLogger("vllm.specplugins")

STEPS = "specplugins_steps"  # attribute of SchedulerOutput: counts that the worker has not seen
DRAFTING = "specplugins_drafting"  # attribute of ModelRunnerOutput: seconds on the host; why the next step has no draft
MORE, WHOLE = "more", "none"  # labels: above the last bound; no token of the draft was rejected
BOUNDS = ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768, 131072), (0, 1, 2, 4, 8, 16, 32, 64))  # of a shape's labels
BURST = 16  # steps that are counted together
_UNKNOWN = 0.0, None
_LABELS = tuple((*map(str, bounds), MORE) for bounds in BOUNDS)


def shape_of(*sizes: float) -> tuple[str, ...]:
    """The labels of a shape: for each size, the smallest bound that is not below it.

    >>> shape_of(3, 700.5, 31), shape_of(300, 0, 0)
    (('4', '2048', '32'), ('more', '512', '0'))
    """
    return tuple(labels[bisect_left(bounds, size)] for bounds, labels, size in zip(BOUNDS, _LABELS, sizes, strict=True))


class StepWatch:
    """Counts steps in groups, since code that runs once per step has a cold cache. A failure ends the counting and
    affects no request."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock, self._at, self._reason, self._has_failed = clock, nan, None, False
        self._steps: list[Any] = []  # when each outcome arrived, and `add`'s arguments; None: then there was no request

    def add(self, scheduled: Any, output: Any, num_sampled: Any, chosen: Any = None, verified: Any = None) -> None:
        """Adds a step, with the sampled tokens of each row, the draft length that the scheduler chose for it, and its
        verified draft tokens if drafts were trimmed."""
        drafting = getattr(output, DRAFTING, _UNKNOWN)
        facts = output.req_id_to_index, output.cudagraph_stats, drafting  # the output has tensors, too
        self._steps.append((self._clock(), scheduled, facts, num_sampled, chosen, verified))

    def pause(self) -> None:
        """Stops the clock while there are no requests."""
        self._steps.append(None)

    def taken(self) -> Mapping[str, Any]:
        """Increments and lists of seconds since the last call, by series; empty until there are many, or no requests
        are left."""
        steps, counts, times = self._steps, defaultdict[str, float](float), defaultdict[str, list[float]](list)
        if not steps or (len(steps) < BURST and steps[-1] is not None):
            return {}
        self._steps = []
        try:
            for step in steps * (not self._has_failed):
                self._count(step, counts, times)
        except Exception as error:
            self._has_failed = True
            logger.error("Steps are not counted any more (%s); requests go on.", cause_text(error))
        return {**counts, **times}

    def _count(self, step: Any, counts: dict[str, float], times: dict[str, list[float]]) -> None:
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
        cached_request_data = scheduled.scheduled_cached_reqs
        context = sum(cached_request_data.num_computed_tokens) / num_reqs
        shape = shape_of(num_reqs, context, 0 if reason else max(lengths))
        graph = cuda_graph_stat.runtime_mode.rpartition(".")[2].lower() if cuda_graph_stat else "unknown"
        counts[key("shape_steps", *shape, graph)] += 1
        counts[key("shape_tokens", *shape)] += sum(num_sampled)
        if not isnan(now - before):
            counts[key("shape_draft_time_seconds", *shape)] += draft_seconds
            times[key("shape_time_seconds", *shape)].append(now - before)
        if reason is not None:
            counts[key("undrafted_steps", reason)] += 1
            return
        sampled = map(num_sampled.__getitem__, map(index.__getitem__, drafts))
        for (length, emitted), num in Counter(zip(lengths, sampled, strict=True)).items():
            accepted = max(0, emitted - 1)
            position = WHOLE if accepted >= length else 1 << accepted.bit_length() >> 1
            counts[key("shape_first_rejections", *shape, position)] += num


class StepTotals:
    """Running totals by series: `counts` for reports, and times, which `observe` also enters into a histogram."""

    def __init__(self, observe: Callable[[str, float], None]):
        self._observe = observe
        self.counts, self._seconds = defaultdict[str, float](float), defaultdict[str, float](float)

    def add(self, more: Mapping[str, Any]) -> None:
        """Adds the counts of a StepWatch."""
        for series, value in more.items():
            if not isinstance(value, list):
                self.counts[series] += value
                continue
            self._seconds[series] += sum(value)
            for seconds in value:
                self._observe(series, seconds)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each series: its metric, its labels and its total."""
        labels, rows = {metric.name: metric.labels for metric in TABLE}, []
        for series, total in {**self.counts, **self._seconds}.items():
            name, *values = series.split(SEPARATOR)
            rows.append({"metric": name, **dict(zip(labels[name], values, strict=True)), "total": total})
        return rows
