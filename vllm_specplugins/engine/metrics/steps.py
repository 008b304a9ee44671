"""Steps that only decode, by shape: the number of requests, their mean context and the longest draft, in buckets.

The scheduler knows a step's outcome, and the worker exports metrics. `StepWatch` makes a `StepRecord` of each step in
the scheduler, and the next step carries it to the worker's `StepTotals`. The time of a step ends when its outcome
arrives and begins with the one before; it contains the drafting for the next step.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import isnan, nan
from time import perf_counter
from typing import Any, NamedTuple

from vllm_specplugins.engine.metrics.names import SEPARATOR, TABLE, key

logger = logging.getLogger("vllm.specplugins")

RECORDS = "specplugins_steps"  # attribute of SchedulerOutput: StepRecords that the worker has not seen
DRAFTING = "specplugins_drafting"  # attribute of ModelRunnerOutput: seconds on the host; why the next step has no draft
MORE, WHOLE = "more", "none"  # labels: above the last bound; no token of the draft was rejected
BOUNDS = ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768, 131072), (0, 1, 2, 4, 8, 16, 32, 64))  # of a shape's labels
BURST = 16  # steps that are recorded together
_UNKNOWN = 0.0, None
_LABELS = tuple((*map(str, bounds), MORE) for bounds in BOUNDS)


def shape_of(*sizes: float) -> tuple[str, ...]:
    """The labels of a shape: for each size the least bound that is not below it.

    >>> shape_of(3, 700.5, 31), shape_of(300, 0, 0)
    (('4', '2048', '32'), ('more', '512', '0'))
    """
    return tuple(labels[bisect_left(bounds, size)] for bounds, labels, size in zip(BOUNDS, _LABELS, sizes, strict=True))


class StepRecord(NamedTuple):
    """A step. `seconds` is nan if the engine waited before it. `first_rejections` counts requests by position, in
    powers of two; `reason` says why no draft was verified."""

    shape: tuple[str, ...]
    graph: str
    seconds: float
    draft_seconds: float
    num_tokens: int
    first_rejections: dict[str, int]
    reason: str | None


class StepWatch:
    """Records steps, many at a time: code that runs once a step finds no warm cache. A failure ends the records, and
    reaches no request."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock, self._at, self._reason, self._has_failed = clock, nan, None, False
        self._steps: list[Any] = []  # when each outcome arrived, and `add`'s arguments; None: then there was no request

    def add(
        self, scheduled: Any, output: Any, num_sampled: list[int], chosen: Any = None, verified: Any = None
    ) -> None:
        """Adds a step, with the sampled tokens of each row, the draft length that the scheduler chose for it, and its
        verified draft tokens if drafts were trimmed."""
        drafting = getattr(output, DRAFTING, _UNKNOWN)
        facts = output.req_id_to_index, output.cudagraph_stats, drafting  # the output has tensors, too
        self._steps.append((self._clock(), scheduled, facts, num_sampled, chosen, verified))

    def pause(self) -> None:
        """Stops the clock while there are no requests."""
        self._steps.append(None)

    def taken(self) -> list[StepRecord]:
        """The records since the last ones, if there are enough or no request is left."""
        steps = self._steps
        if not steps or (len(steps) < BURST and steps[-1] is not None):
            return []
        self._steps = []
        try:
            return [] if self._has_failed else [record for step in steps for record in self._records(step)]
        except Exception:
            self._has_failed = True
            logger.exception("Steps are not recorded any more; requests go on.")
            return []

    def _records(self, step: Any) -> Iterator[StepRecord]:
        """The record of a step, or none of one that reads prompts."""
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
        yield StepRecord(
            shape_of(num_reqs, context, 0 if reason else max(lengths)),
            cuda_graph_stat.runtime_mode.rpartition(".")[2].lower() if cuda_graph_stat else "unknown",
            now - before,
            draft_seconds,
            sum(num_sampled),
            {} if reason else _first_rejections(lengths, map(index.__getitem__, drafts), num_sampled),
            reason,
        )


def _first_rejections(lengths: list[int], rows: Iterable[int], num_sampled: list[int]) -> dict[str, int]:
    counts = Counter[str]()
    for (length, sampled), num in Counter(zip(lengths, map(num_sampled.__getitem__, rows), strict=True)).items():
        accepted = max(0, sampled - 1)
        counts[WHOLE if accepted >= length else str(1 << accepted.bit_length() >> 1)] += num
    return dict(counts)


class StepTotals:
    """Running totals by series: `counts` for reports, and times, which `observe` also takes for a histogram."""

    def __init__(self, observe: Callable[[str, float], None]):
        self._observe = observe
        self.counts, self._seconds = defaultdict[str, float](float), defaultdict[str, float](float)

    def add(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            shape = record.shape
            self.counts[key("shape_steps", *shape, record.graph)] += 1
            self.counts[key("shape_tokens", *shape)] += record.num_tokens
            for position, num in record.first_rejections.items():
                self.counts[key("shape_first_rejections", *shape, position)] += num
            if record.reason is not None:
                self.counts[key("undrafted_steps", record.reason)] += 1
            if not isnan(record.seconds):
                self.counts[key("shape_draft_time_seconds", *shape)] += record.draft_seconds
                self._seconds[series := key("shape_time_seconds", *shape)] += record.seconds
                self._observe(series, record.seconds)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each series: its metric, its labels and its total."""
        labels, rows = {metric.name: metric.labels for metric in TABLE}, []
        for series, total in {**self.counts, **self._seconds}.items():
            name, *values = series.split(SEPARATOR)
            rows.append({"metric": name, **dict(zip(labels[name], values, strict=True)), "total": total})
        return rows
