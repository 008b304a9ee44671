"""The policy `auto`: by request and step, the first drafter's tokens, the second's, or both behind each other.

What each choice is worth is the sum of its tokens' chances to be accepted, by the records, less their price; what it
costs the batch are the passes of the second drafter (see Gate.shares). Two things are free where a lookup stands first:
a model stage may check what that has found, as under `verify`, where it is the quicker for it; and what the lookup says
behind the model's tokens is added. Where these are what it had found, its match is the longer for it: a short match
alone is worth little, one that a model begins alike is worth a lot.
"""

import time
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.proposers.accounts import Accounts
from vllm_specplugins.proposers.drafted import Array, Drafted
from vllm_specplugins.proposers.drafters import Drafter, allows
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.proposers.records import Ints, Rows


@dataclass(slots=True)
class Auto:
    """Two drafters and a gate, which chooses how many tokens each request gets of the first one, and behind these of
    the second one, the stage with this index.

    Args:
        first: its drafts are free, or paid for.
        checked: the second one, which checks what a lookup finds, and makes the same tokens; None: it cannot.
        lookup: continues drafts at no cost; None: there is none.
        is_free: whether the second's drafts cost nothing; these do not continue the first's.
        continues: whether the second continues drafts; otherwise it only begins some.
        name: of the second stage, in requests' options.
        most: tokens that it drafts for one request.
    """

    first: Drafter
    second: Drafter
    checked: Drafter | None
    lookup: Drafter | None
    gate: Gate
    rows: Rows
    accounts: Accounts
    index: int
    is_free: bool
    continues: bool
    name: str
    most: int
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request
    has_checked: bool | None = None  # in the last step; None: there was nothing to check

    def draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        wanted, allowed = wanted.astype(np.int64, copy=False), allows(batch.options, self.name)
        found, most = self.first.draft(batch, begun, wanted), np.minimum(wanted, self.most)
        if allowed is not None:
            most = np.where(allowed, most, 0)
        offered, sure = None, np.full(len(wanted), FIRST_CONFIDENCE)
        if self.is_free:
            offered = self.second.draft(batch, begun, most)
            sure, most = offered.confidence, offered.num_draft
        rows = self.rows.of(batch.request_ids)
        kept, own = self.gate.shares(rows, found, self.index, sure, most, wanted, self.continues)
        self.accounts.add_lengths(self.index, own, most)
        drafts = found._replace(num_draft=kept)
        self.num_drafted = 0
        if not own.any():
            return drafts
        if offered is None:
            self.num_drafted = int(own.max())
            offered = self._drafted(
                batch, _behind(begun, drafts), own, bool(((kept == 0) & (found.num_draft > 0)).any())
            )
        drafts = drafts.followed_by(offered._replace(num_draft=own))
        return self._prolonged(batch, begun, drafts, rows, own > 0, wanted)

    def _drafted(self, batch: DraftBatch, begun: Drafted, own: Ints, has_found: bool) -> Drafted:
        self.has_checked = None
        drafter = self.second
        if has_found and self.checked is not None and self.num_drafted > 1:
            self.has_checked = self.gate.checks(self.index)
            drafter = self.checked if self.has_checked else drafter
        start = time.perf_counter()
        drafts = drafter.draft(batch, begun, own)
        self.drafting_ms = (time.perf_counter() - start) * 1000
        return drafts

    def _prolonged(
        self, batch: DraftBatch, begun: Drafted | None, drafts: Drafted, rows: Ints, has_own: Array, wanted: Ints
    ) -> Drafted:
        """With what a lookup says behind the second one's tokens, as far as that pays."""
        if self.lookup is None:
            return drafts
        room = np.where(has_own, wanted - drafts.num_draft, 0)
        longer = drafts.followed_by(self.lookup.draft(batch, _behind(begun, drafts), room))
        pays = np.minimum(self.gate.paying(rows, longer), longer.num_draft)
        return longer._replace(num_draft=np.maximum(drafts.num_draft, pays))


def _behind(begun: Drafted | None, drafts: Drafted) -> Drafted:
    return drafts if begun is None else begun.followed_by(drafts)
