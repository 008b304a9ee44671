"""The policy `auto`: by request and step, the first drafter's tokens, the second's, or both, one after the other.

What each choice gains is the sum of its tokens' acceptance probabilities, by the ledger, less their price; what it
costs the batch are the passes of the second drafter (see Gate.split_draft). Where a lookup stands first, what it finds
after the model's tokens is added for free. Where these are what it had found, its match is the longer for it: a short
match alone brings little, one that a model begins alike a lot. A stage alone has no other one beside it.
"""

import time
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.cascade.drafters import Drafter, allows
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.gate.ledger import Ledger
from vllm_specplugins.structures.draft_arrays import Array, DraftArrays, nothing
from vllm_specplugins.structures.slots import Ints, SlotTable


@dataclass(slots=True)
class Auto:
    """Two drafters and a gate, which chooses how many tokens each request gets of the first one, and after these of
    the second one, the stage with this index.

    Args:
        index: of the second stage; where there is none, of the first.
        max_num_draft: K.
        first: its drafts are free, or paid for; None: there is none.
        second: None: there is none.
        lookup: continues drafts at no cost; None: there is none.
        is_free: whether the second's drafts cost nothing; these do not continue the first's.
        continues: whether the second continues drafts; otherwise it only begins some.
        name: of the second stage, in requests' options; None: they are seen to.
        most: tokens that it drafts for one request.
    """

    gate: Gate
    rows: SlotTable
    ledger: Ledger
    index: int
    max_num_draft: int
    first: Drafter | None = None
    second: Drafter | None = None
    lookup: Drafter | None = None
    is_free: bool = False
    continues: bool = False
    name: str | None = None
    most: int = 0
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        max_draft, most = max_draft.astype(np.int64, copy=False), self._most(batch, max_draft)
        found = (
            self.first.draft(batch, prefix, max_draft)
            if self.first is not None
            else nothing(len(max_draft), self.max_num_draft)
        )
        offered, confidence = None, np.full(len(max_draft), FIRST_CONFIDENCE)
        if self.is_free and self.second is not None:
            offered = self.second.draft(batch, prefix, most)
            confidence, most = offered.confidence, offered.num_draft
        rows = self.rows.of(batch.request_ids)
        kept, own = self.gate.split_draft(rows, found, self.index, confidence, most, max_draft, self.continues)
        chosen = (kept, found.num_draft) if self.second is None else (own, most)
        self.ledger.add_lengths(self.index, *chosen)
        drafts = found._replace(num_draft=kept)
        self.num_drafted = 0
        if not own.any():
            return drafts
        if offered is None:
            self.num_drafted = int(own.max())
            start = time.perf_counter()
            assert self.second is not None
            offered = self.second.draft(batch, _after(prefix, drafts), own)
            self.drafting_ms = (time.perf_counter() - start) * 1000
        drafts = offered if self.first is None else drafts.followed_by(offered._replace(num_draft=own))
        return self._prolonged(batch, prefix, drafts, rows, own > 0, max_draft)

    def _most(self, batch: DraftBatch, max_draft: Array) -> Ints:
        """[R], tokens that the second stage may draft."""
        most: Ints = np.minimum(max_draft, self.most, dtype=np.int64)
        allowed = None if self.name is None else allows(batch.options, self.name)
        return most if allowed is None else np.where(allowed, most, 0)

    def _prolonged(
        self,
        batch: DraftBatch,
        prefix: DraftArrays | None,
        drafts: DraftArrays,
        rows: Ints,
        has_own: Array,
        max_draft: Ints,
    ) -> DraftArrays:
        """With what a lookup finds after the second one's tokens, as far as that pays."""
        if self.lookup is None:
            return drafts
        room = np.where(has_own, max_draft - drafts.num_draft, 0)
        longer = drafts.followed_by(self.lookup.draft(batch, _after(prefix, drafts), room))
        pays = np.minimum(self.gate.profitable_length(rows, longer), longer.num_draft)
        return longer._replace(num_draft=np.maximum(drafts.num_draft, pays))


def _after(prefix: DraftArrays | None, drafts: DraftArrays) -> DraftArrays:
    return drafts if prefix is None else prefix.followed_by(drafts)
