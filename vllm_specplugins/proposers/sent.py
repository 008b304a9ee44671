"""What a cascade drafted last for each request, until it is known what became of it; and the counts of both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_specplugins.counters import StageCounters, count
from vllm_specplugins.proposers.drafted import Array, Drafted, columns
from vllm_specplugins.proposers.records import with_room


class Fates(NamedTuple):
    """What became of drafts, R requests. See Drafted for `stage` and `confidence`.

    Args:
        num_draft: [R] tokens that were verified.
        num_accepted: [R]
    """

    stage: Array
    confidence: Array
    num_draft: Array
    num_accepted: Array


class Sent:
    """One row of arrays for each request (see records.Rows)."""

    def __init__(self, width: int, num_rows: int = 1):
        self._num_draft = np.zeros(num_rows, np.int64)
        self._stage, self._confidence = np.zeros((num_rows, width), np.int64), np.zeros((num_rows, width))

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        if num_rows > len(self._num_draft):
            self._num_draft, self._stage, self._confidence = (
                with_room(array, num_rows) for array in (self._num_draft, self._stage, self._confidence)
            )

    def put(self, rows: Array, drafts: Drafted) -> None:
        """Keeps the newest drafts, of requests that have these rows."""
        parts = (drafts.num_draft, drafts.stage, drafts.confidence)
        for array, part in zip((self._num_draft, self._stage, self._confidence), parts, strict=True):
            array[rows] = part

    def take(self, rows: Array, num_draft: Array, num_accepted: Array) -> Fates:
        """What became of these drafts, whose verified tokens are told; they are not kept any longer."""
        known = np.minimum(self._num_draft[rows], num_draft)
        self._num_draft[rows] = 0
        return Fates(self._stage[rows], self._confidence[rows], known, num_accepted)

    def clear(self, rows: Array) -> None:
        """Forgets these requests."""
        self._num_draft[rows] = 0


def count_drafts(counters: Sequence[StageCounters], drafts: Drafted) -> None:
    """Counts, by stage, tokens that go to the target and drafts that have any of them."""
    is_drafted = drafts.is_drafted
    for index, own in enumerate(counters):
        is_own = is_drafted & (drafts.stage == index)
        own.kept += int(np.count_nonzero(is_own))
        own.drafts += int(np.count_nonzero(is_own.any(axis=1)))


def count_fates(counters: Sequence[StageCounters], fates: Fates) -> None:
    """Counts, by stage, tokens that the target looked at and those that it accepted."""
    places = columns(fates.stage)
    is_verified, is_accepted = places < fates.num_draft[:, None], places < fates.num_accepted[:, None]
    for index, own in enumerate(counters):
        is_own = is_verified & (fates.stage == index)
        own.verified += int(np.count_nonzero(is_own))
        accepted_at = (is_own & is_accepted).sum(axis=0).tolist()
        own.accepted += sum(accepted_at)
        for position, num in enumerate(accepted_at):
            if num:
                count(own.accepted_at, position, num)
