"""What the stages of a cascade drafted where the host does not look, and what became of it, told one step late."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.proposers.drafted import Drafted
from vllm_specplugins.proposers.exit_gate import Brought, ExitGate, Floats
from vllm_specplugins.proposers.records import Rows, with_room
from vllm_specplugins.proposers.sent import Fates, Sent, count_by_place, count_drafts, count_fates

EXIT = 1  # the stage
NUM_KINDS = 3
Ints = npt.NDArray[np.signedinteger[Any]]  # [num_reqs]
Column = npt.NDArray[np.int32]  # [num_reqs, 1]


class Told:
    """Counts for a lookup and an exit.

    Args:
        counters: of the two stages.
        policy: of the cascade.
        width: K.
        depths: see ExitGate.
    """

    def __init__(self, counters: Sequence[StageCounters], policy: str, width: int, depths: Sequence[int]):
        self._counters, self._policy = counters, policy
        self._rows, self._sent = Rows(), Sent(width)
        self._gone: list[str] = []
        self.gate, self._depth = ExitGate(width, depths, NUM_KINDS), 0  # in the newest step that was told
        # A request's kind: in how many steps in a row the lookup had found nothing, as far as is told; and one earlier.
        self._kinds, self._old_kinds = (np.zeros(1, np.int8) for _ in range(2))

    def add(
        self,
        request_ids: Sequence[str],
        num_sampled: Column,
        num_rejected: Column,
        wanted: Column,
        num_draft: Column,
        looked_up: Column,
        exited: Column,
        confirmed: Column,
        depth: Column,  # of the exit in that step
        stage: npt.NDArray[np.int32],  # [num_reqs, K]
    ) -> None:
        """One step: what became of the drafts before, and what was drafted then. See on_device.Parts for its names."""
        rows = self._rows.of(list(request_ids))
        self._make_room(self._rows.num_rows)
        accepted = num_sampled[:, 0] - 1
        verified = accepted + num_rejected[:, 0]
        fates = self._sent.take(rows, verified, accepted)
        self._tell_gate(fates, self._old_kinds[rows], num_sampled[:, 0], verified)
        kinds = self._old_kinds[rows] = self._kinds[rows]
        self._kinds[rows] = np.where(looked_up[:, 0] > 0, 0, np.minimum(kinds + 1, NUM_KINDS - 1))
        if len(rows):
            self._depth = int(depth.max())
        count_fates(self._counters, fates)
        drafts = Drafted(stage, num_draft[:, 0], stage, np.ones(stage.shape))
        self._sent.put(rows, drafts)
        count_drafts(self._counters, drafts)
        for own, num_drafted in zip(self._counters, (looked_up, exited), strict=True):
            own.asked += int(np.count_nonzero(num_drafted >= 0))
            own.drafted += int(num_drafted.clip(0).sum())
        if self._policy == "verify":
            self._counters[0].kept += int(confirmed.sum())
        gone = self._rows.forget(self._gone)
        self._sent.clear(gone)
        self._kinds[gone] = self._old_kinds[gone] = 0
        self._gone.clear()

    def depth(self, request_ids: Sequence[str], draft_ms: float, verify_ms: Floats) -> int:
        """How many tokens the exit shall draft for these requests. See ExitGate.depth."""
        kinds = np.bincount(self._kinds[self._rows.known(request_ids)], minlength=NUM_KINDS)
        return self.gate.depth(kinds.tolist(), draft_ms, verify_ms)

    def _tell_gate(self, fates: Fates, kinds: Ints, num_sampled: Ints, num_verified: Ints) -> None:
        for kind in range(NUM_KINDS):
            is_own = kinds == kind
            own = Fates(*(array[is_own] for array in fates))
            by_place = (count_by_place(own, EXIT, ends) for ends in (own.num_accepted, own.num_draft))
            emitted, looked_at = (int(counts[is_own].sum()) for counts in (num_sampled, num_verified))
            self.gate.add(kind, self._depth, Brought(int(is_own.sum()), emitted, looked_at, *by_place))

    def _make_room(self, num_rows: int) -> None:
        self._sent.make_room(num_rows)
        self._kinds, self._old_kinds = (with_room(array, num_rows) for array in (self._kinds, self._old_kinds))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is held of these requests, when what became of their last drafts has been told, too."""
        self._gone.extend(request_ids)
