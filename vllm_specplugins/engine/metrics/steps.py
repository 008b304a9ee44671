"""Steps that only decode, by shape: the number of requests, their mean context and the longest draft, in buckets.

The scheduler knows a step's outcome, and the worker exports metrics. `StepWatch` makes a `StepRecord` of each step in
the scheduler, and the next step carries it to the worker's `StepTotals`. The time of a step ends when its outcome
arrives and begins with the one before; it contains the drafting for the next step.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from math import isnan, nan
from time import perf_counter
from typing import Any, NamedTuple

from vllm_specplugins.engine.metrics.names import SHAPE, key

logger = logging.getLogger("vllm.specplugins")

RECORDS = "specplugins_steps"  # attribute of SchedulerOutput: StepRecords that the worker has not seen
DRAFTING = "specplugins_drafting"  # attribute of ModelRunnerOutput: seconds on the host; why the next step has no draft
MORE, WHOLE = "more", "none"  # labels: above the last bound; no token of the draft was rejected
BOUNDS = ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768, 131072), (0, 1, 2, 4, 8, 16, 32, 64))  # of SHAPE's labels
_LABELS = tuple((*map(str, bounds), MORE) for bounds in BOUNDS)
Shape = tuple[str, ...]


def shape_of(*sizes: float) -> Shape:
    """The labels of a shape: for each size the least bound that is not below it.

    >>> shape_of(3, 700.5, 31), shape_of(300, 0, 0)
    (('4', '2048', '32'), ('more', '512', '0'))
    """
    return tuple(labels[bisect_left(bounds, size)] for bounds, labels, size in zip(BOUNDS, _LABELS, sizes, strict=True))


class StepRecord(NamedTuple):
    """A step. `seconds` is nan if the engine waited before it. `first_rejections` counts requests by position, in
    powers of two; `reason` says why no draft was verified."""

    shape: Shape
    graph: str
    seconds: float
    draft_seconds: float
    num_tokens: int
    first_rejections: dict[str, int]
    reason: str | None


class StepWatch:
    """Records steps where their outcomes arrive."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock, self._at, self._reason, self._has_failed = clock, nan, None, False
        self._records: list[StepRecord] = []

    def pause(self) -> None:
        """Stops the clock while there are no requests."""
        self._at = nan

    def taken(self) -> list[StepRecord]:
        """The records since the last call."""
        records, self._records = self._records, []
        return records

    def add(
        self,
        scheduled: Any,
        output: Any,
        num_sampled: list[int],
        chosen: int | None = None,
        verified: int | None = None,
    ) -> None:
        """Adds a step, with the sampled tokens of each row, the draft length that the scheduler chose for it, and its
        verified draft tokens if drafts were trimmed; leaves out a step that reads prompts. A failure ends the records,
        and reaches no request."""
        try:
            if not self._has_failed:
                self._add(scheduled, output, num_sampled, chosen, verified)
        except Exception:
            self._has_failed = True
            logger.exception("Steps are not recorded any more; requests go on.")

    def _add(
        self, scheduled: Any, output: Any, num_sampled: list[int], chosen: int | None, verified: int | None
    ) -> None:
        before, self._at = self._at, self._clock()
        draft_seconds, next_reason = getattr(output, DRAFTING, (0.0, None))
        reason, self._reason = self._reason, next_reason
        drafts, num_reqs = scheduled.scheduled_spec_decode_tokens, len(scheduled.num_scheduled_tokens)
        lengths = list(map(len, drafts.values()))
        planned = sum(lengths)
        if not num_reqs or scheduled.scheduled_new_reqs or scheduled.total_num_scheduled_tokens != num_reqs + planned:
            return
        verified = planned if verified is None else min(verified, planned)
        if verified:
            reason = None
        elif planned:
            reason = "trimmed"
        else:
            reason = "scheduler" if chosen == 0 else reason or "no draft"
        cached_request_data, cuda_graph_stat = scheduled.scheduled_cached_reqs, output.cudagraph_stats
        context = sum(cached_request_data.num_computed_tokens) / num_reqs
        rows = map(output.req_id_to_index.__getitem__, drafts)
        first_rejections = _first_rejections(lengths, rows, num_sampled) if verified else {}
        self._records.append(
            StepRecord(
                shape_of(num_reqs, context, max(lengths) if verified else 0),
                cuda_graph_stat.runtime_mode.rpartition(".")[2].lower() if cuda_graph_stat else "unknown",
                self._at - before,
                draft_seconds,
                sum(num_sampled),
                first_rejections,
                reason,
            )
        )


def _first_rejections(lengths: list[int], rows: Iterable[int], num_sampled: list[int]) -> dict[str, int]:
    counts = Counter[str]()
    for (length, sampled), num in Counter(zip(lengths, map(num_sampled.__getitem__, rows), strict=True)).items():
        accepted = max(0, sampled - 1)
        counts[WHOLE if accepted >= length else str(1 << accepted.bit_length() >> 1)] += num
    return dict(counts)


@dataclass(slots=True)
class ShapeCounters:
    """Running totals of a shape; steps are counted by CUDA graph."""

    steps: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    tokens: int = 0
    first_rejections: Counter[str] = field(default_factory=Counter)


class StepTotals:
    """Running totals of all shapes, and of steps without a draft by reason; `observe` takes times for a histogram."""

    def __init__(self, observe: Callable[[str, float], None]):
        self._observe = observe
        self._shapes = defaultdict[Shape, ShapeCounters](ShapeCounters)
        self._undrafted = Counter[str]()

    def add(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            totals = self._shapes[record.shape]
            totals.steps[record.graph] += 1
            totals.tokens += record.num_tokens
            totals.first_rejections.update(record.first_rejections)
            if record.reason is not None:
                self._undrafted[record.reason] += 1
            if not isnan(record.seconds):
                totals.seconds += record.seconds
                totals.draft_seconds += record.draft_seconds
                self._observe(key("shape_time_seconds", *record.shape), record.seconds)

    def counts(self) -> Iterator[tuple[str, float]]:
        """Each counter's series and total."""
        for shape, totals in self._shapes.items():
            yield key("shape_draft_time_seconds", *shape), totals.draft_seconds
            yield key("shape_tokens", *shape), totals.tokens
            for graph, num in totals.steps.items():
                yield key("shape_steps", *shape, graph), num
            for position, num in totals.first_rejections.items():
                yield key("shape_first_rejections", *shape, position), num
        for reason, num in self._undrafted.items():
            yield key("undrafted_steps", reason), num

    def as_dict(self) -> dict[str, Any]:
        """Plain values, one dictionary for each shape."""
        shapes = []
        for shape, totals in self._shapes.items():
            values = {entry.name: getattr(totals, entry.name) for entry in fields(totals)}
            counts = {name: dict(value) for name, value in values.items() if isinstance(value, Counter)}
            shapes.append(dict(zip(SHAPE, shape, strict=True)) | values | counts)
        return {"shapes": shapes, "undrafted": dict(self._undrafted)}
