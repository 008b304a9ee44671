"""What a cascade on the host drafted last for each request, until its fate is known; and the counts of both."""

from collections.abc import Sequence

import numpy as np

from vllm_specplugins.counters import StageCounters, count
from vllm_specplugins.draft import Draft, Int32Array
from vllm_specplugins.proposers.drafted import Drafted, dense_logits
from vllm_specplugins.proposers.host import accounts as host
from vllm_specplugins.proposers.records import Ints, with_room
from vllm_specplugins.proposers.sent import Fates


class Accounts:
    """One row of arrays for each request (see records.Rows), as Sent has; and counts that nobody has read yet."""

    def __init__(self, num_stages: int, width: int):
        self._num_draft = np.zeros(1, np.int64)
        self._stage = np.zeros((1, width), np.int64)
        self._confidence = np.zeros((1, width))
        self._counts = np.zeros((num_stages, host.NUM_COUNTS), np.int64)
        self._accepted_at = np.zeros((num_stages, width), np.int64)
        self._lengths = np.zeros((num_stages, width + 1), np.int64)

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        if num_rows > len(self._num_draft):
            self._num_draft, self._stage, self._confidence = (
                with_room(array, num_rows) for array in (self._num_draft, self._stage, self._confidence)
            )

    def put(self, rows: Ints, drafts: Drafted) -> Draft:
        """Keeps and counts the newest drafts, of requests that have these rows; the same as one draft."""
        num_reqs = len(rows)
        num_draft, stage = np.empty(num_reqs, np.int32), np.empty(num_reqs, np.int32)
        confidence = np.empty(num_reqs, np.float32)
        kept = self._num_draft, self._stage, self._confidence
        made = drafts.num_draft, drafts.stage, drafts.confidence
        width = host.put(rows, *made, *kept, self._counts, num_draft, confidence, stage)
        return Draft(drafts.token_ids[:, :width], num_draft, confidence, dense_logits(drafts, width), stage)

    def take(self, rows: Ints, num_draft: Int32Array, num_accepted: Int32Array) -> Fates | None:
        """What became of these drafts, whose verified tokens are told, counted and not kept any longer; None where no
        token was verified."""
        num_reqs, width = len(rows), self._stage.shape[1]
        kept = self._num_draft, self._stage, self._confidence
        known, stage = np.empty(num_reqs, np.int64), np.empty((num_reqs, width), np.int64)
        confidence = np.empty((num_reqs, width))
        told, accepted = num_draft.astype(np.int64), num_accepted.astype(np.int64)
        tables = self._counts, self._accepted_at
        if not host.take(rows, told, accepted, *kept, *tables, known, stage, confidence):
            return None
        return Fates(stage, confidence, known, accepted)

    def went_on(self, rows: Ints, num_accepted: Int32Array, stage: int, least: int) -> bool:
        """Whether of each request a draft of so many tokens or more was accepted whole, whose last one was not of this
        stage."""
        num_draft = self._num_draft[rows]
        last = self._stage[rows, np.maximum(num_draft, 1) - 1]
        return bool(((num_draft >= least) & (num_draft == num_accepted) & (last != stage)).all())

    def clear(self, rows: Ints) -> None:
        """Forgets these requests."""
        self._num_draft[rows] = 0

    def add_lengths(self, stage: int, lengths: Ints, most: Ints) -> None:
        """Counts the lengths that a gate chose for the requests that may have any of this stage."""
        host.add_lengths(lengths, most, self._lengths[stage])

    def move_to(self, counters: Sequence[StageCounters]) -> None:
        """Adds the counts to those of the stages, and begins anew."""
        tables = self._counts, self._accepted_at, self._lengths
        for own, counts, accepted_at, lengths in zip(counters, *(table.tolist() for table in tables), strict=True):
            own.kept += counts[host.KEPT]
            own.drafts += counts[host.DRAFTS]
            own.verified += counts[host.VERIFIED]
            own.accepted += sum(accepted_at)
            for totals, found in ((own.accepted_at, accepted_at), (own.gate_lengths, lengths)):
                for index, more in enumerate(found):
                    if more:
                        count(totals, index, more)
        for table in tables:
            table[:] = 0
