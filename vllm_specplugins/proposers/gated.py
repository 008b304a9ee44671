"""A stage of a cascade, and the gate that chooses the lengths of its drafts."""

import time
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.proposers.accounts import Accounts
from vllm_specplugins.proposers.drafted import Array, Drafted, nothing
from vllm_specplugins.proposers.drafters import Drafter
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.proposers.records import Ints, Rows


@dataclass(slots=True)
class Gated:
    """A drafter whose lengths a gate chooses: before it drafts, if drafting costs, and after it, if that was free.

    `alone` makes the drafter's tokens without checking what others find; the quicker one of them drafts.
    """

    drafter: Drafter
    gate: Gate
    rows: Rows
    index: int
    is_free: bool
    accounts: Accounts
    width: int  # K
    alone: Drafter | None = None
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request
    has_checked: bool | None = None  # in the last step; None: there was no choice

    def draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        if self.is_free:
            drafts = self.drafter.draft(batch, begun, wanted)
            return drafts._replace(num_draft=self._lengths(batch, drafts.confidence, drafts.num_draft))
        lengths = self._lengths(batch, np.full(batch.num_reqs, FIRST_CONFIDENCE), wanted)
        self.num_drafted = max(lengths.tolist(), default=0)
        if self.num_drafted == 0:
            return nothing(batch.num_reqs, self.width)
        drafter, self.has_checked = self.drafter, None
        if self.alone is not None and self.num_drafted > 1:
            self.has_checked = self.gate.checks(self.index)
            drafter = self.drafter if self.has_checked else self.alone
        start = time.perf_counter()
        drafts = drafter.draft(batch, begun, lengths)
        self.drafting_ms = (time.perf_counter() - start) * 1000
        return drafts

    def _lengths(self, batch: DraftBatch, confidence: Array, most: Array) -> Ints:
        lengths = self.gate.lengths(self.rows.of(batch.request_ids), self.index, confidence, most)
        self.accounts.add_lengths(self.index, lengths, most)
        return lengths
