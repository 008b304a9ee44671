"""What the stages of a cascade drafted where the host does not look, and what became of it, told one step late."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.proposers.drafted import Drafted, columns
from vllm_specplugins.proposers.exit_gate import Brought, ExitGate, Floats
from vllm_specplugins.proposers.records import Rows, with_room
from vllm_specplugins.proposers.sent import Fates, Sent, count_drafts, count_fates

EXIT = 1  # the stage
NUM_KINDS = 3
Ints = npt.NDArray[np.signedinteger[Any]]


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

    def add(self, request_ids: Sequence[str], numbers: Ints) -> None:
        """One step: what became of the drafts before, and what was drafted then.

        Args:
            numbers: [num_reqs, 8 + K]: tokens sampled, and drafts rejected; tokens wanted, and drafted; see
                on_device.Parts for the next three; how deep the exit drafted; each token's stage.
        """
        num_sampled, num_rejected, _, num_draft, looked_up, exited, confirmed, depth = numbers[:, :8].T
        stage = numbers[:, 8:]
        rows = self._rows.of(list(request_ids))
        self._make_room(self._rows.num_rows)
        accepted = num_sampled - 1
        verified = accepted + num_rejected
        fates = self._sent.take(rows, verified, accepted)
        self._tell_gate(fates, self._old_kinds[rows], num_sampled, verified)
        kinds = self._old_kinds[rows] = self._kinds[rows]
        self._kinds[rows] = np.where(looked_up > 0, 0, np.minimum(kinds + 1, NUM_KINDS - 1))
        if len(rows):
            self._depth = int(depth.max())
        count_fates(self._counters, fates)
        drafts = Drafted(stage, num_draft, stage, np.ones(stage.shape))
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
        """What the step brought, summed over the requests of each kind."""
        places, is_exits = columns(fates.stage), fates.stage == EXIT
        by_place = (is_exits & (places < ends[:, None]) for ends in (fates.num_accepted, fates.num_draft))
        numbers = np.concatenate((np.stack((num_sampled, num_verified), axis=1), *by_place), axis=1, dtype=np.float64)
        is_kind = kinds == np.arange(NUM_KINDS)[:, None]
        width = places.shape[-1]
        for kind, (num_reqs, own) in enumerate(zip(is_kind.sum(axis=1).tolist(), is_kind @ numbers, strict=True)):
            emitted, verified = own[:2].tolist()
            self.gate.add(kind, self._depth, Brought(num_reqs, emitted, verified, own[2 : 2 + width], own[2 + width :]))

    def _make_room(self, num_rows: int) -> None:
        self._sent.make_room(num_rows)
        self._kinds, self._old_kinds = (with_room(array, num_rows) for array in (self._kinds, self._old_kinds))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is held of these requests, when what became of their last drafts has been told, too."""
        self._gone.extend(request_ids)
