"""The drafts that a cascade sent last, how many of their tokens were accepted, and acceptance by stage since.

The model of acceptance is that of kernels/acceptance, which has it for drafts on the device; here its loops are
compiled for the host. One row of arrays for each request (rows.py). R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_specplugins.counters import StageCounters, count
from vllm_specplugins.draft import Draft, Int32Array
from vllm_specplugins.gate import ledger_numba as host
from vllm_specplugins.kernels.acceptance import FIRST_GUESSES, NUM_GRADES, PRIOR_WEIGHT
from vllm_specplugins.structures.draft_arrays import DraftArrays, dense_logits
from vllm_specplugins.structures.slots import Ints, with_room


class Ledger:
    """See the module. It grows with the requests."""

    def __init__(self, num_stages: int, max_num_draft: int):
        self._sent = np.zeros(1, np.int64), np.zeros((1, max_num_draft), np.int64), np.zeros((1, max_num_draft))
        places = np.zeros((num_stages, max_num_draft), np.int64)
        self._totals = np.zeros((num_stages, host.NUM_TOTALS), np.int64), places
        self._lengths = np.zeros((num_stages, max_num_draft + 1), np.int64)
        shape = num_stages, NUM_GRADES
        self._own = np.zeros((1, *shape)), np.zeros((1, *shape)), np.zeros((1, num_stages))
        tried = np.full(shape, PRIOR_WEIGHT)
        self._shared = tried, tried * np.array(FIRST_GUESSES)

    @property
    def records(self) -> tuple[Any, ...]:
        """What the compiled functions go by: of each request, stage and grade the tokens tried and accepted, the length
        of a stage's last draft if all of it was accepted, and tokens tried and accepted of all requests."""
        return *self._own, *self._shared

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        if num_rows > len(self._sent[0]):
            num_sent, stages, confidence = (with_room(array, num_rows) for array in self._sent)
            tried, accepted, whole = (with_room(array, num_rows) for array in self._own)
            self._sent, self._own = (num_sent, stages, confidence), (tried, accepted, whole)

    def put(self, rows: Ints, drafts: DraftArrays) -> Draft:
        """Keeps and counts the newest drafts, of requests that have these rows; the same as one draft."""
        num_reqs = len(rows)
        num_draft, stage = np.empty(num_reqs, np.int32), np.empty(num_reqs, np.int32)
        confidence = np.empty(num_reqs, np.float32)
        made = drafts.num_draft, drafts.stage, drafts.confidence
        width = host.put(rows, made, self._sent, self._totals, num_draft, confidence, stage)
        return Draft(drafts.token_ids[:, :width], num_draft, confidence, dense_logits(drafts, width), stage)

    def settle(self, rows: Ints, num_draft: Int32Array, num_accepted: Int32Array) -> None:
        """What became of these drafts: counted, learned from, and not kept any longer.

        Args:
            num_draft, num_accepted: [R], tokens verified and accepted.
        """
        fates = num_draft.astype(np.int64), num_accepted.astype(np.int64)
        host.settle(rows, *fates, self._sent, self._totals, self.records)

    def went_on(self, rows: Ints, num_accepted: Int32Array, stage: int, least: int) -> bool:
        """Whether of each request a draft of so many tokens or more was accepted whole, whose last one was not of this
        stage."""
        num_sent, stages, _ = self._sent
        num_draft = num_sent[rows]
        last = stages[rows, np.maximum(num_draft, 1) - 1]
        return bool(((num_draft >= least) & (num_draft == num_accepted) & (last != stage)).all())

    def num_kept(self, stage: int) -> int:
        """Tokens of a stage that went to the target, since the counts were moved."""
        return int(self._totals[0][stage, host.KEPT])

    def clear(self, rows: Ints) -> None:
        """Forgets these requests."""
        for array in (self._sent[0], *self._own):
            array[rows] = 0

    def add_lengths(self, stage: int, lengths: Ints, most: Ints) -> None:
        """Counts the lengths that a gate chose for the requests that may have any of this stage."""
        host.add_lengths(lengths, most, self._lengths[stage])

    def move_to(self, counters: Sequence[StageCounters]) -> None:
        """Adds the counts to those of the stages, and begins anew."""
        tables = *self._totals, self._lengths
        for own, totals, accepted_at, lengths in zip(counters, *(table.tolist() for table in tables), strict=True):
            own.kept += totals[host.KEPT]
            own.drafts += totals[host.DRAFTS]
            own.verified += totals[host.VERIFIED]
            own.accepted += sum(accepted_at)
            for known, found in ((own.accepted_at, accepted_at), (own.gate_lengths, lengths)):
                for index, more in enumerate(found):
                    if more:
                        count(known, index, more)
        for table in tables:
            table[:] = 0
