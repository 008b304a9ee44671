"""What the stages of a cascade drafted where the host does not look, and what became of it, told one step late."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import StageCounters
from vllm_specplugins.proposers.drafted import Drafted
from vllm_specplugins.proposers.exit_gate import ExitGate
from vllm_specplugins.proposers.records import Rows
from vllm_specplugins.proposers.sent import Sent, count_drafts, count_fates

Column = npt.NDArray[np.int32]  # [num_reqs, 1]


class Told:
    """Counts for a lookup and an exit.

    Args:
        counters: of the two stages.
        policy: of the cascade.
        width: K.
    """

    def __init__(self, counters: Sequence[StageCounters], policy: str, width: int):
        self._counters, self._policy = counters, policy
        self._rows, self._sent = Rows(), Sent(width)
        self._gone: list[str] = []
        self.gate, self._has_exited = ExitGate(width), False  # in the step before the newest that was told

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
        has_exited: Column,
        stage: npt.NDArray[np.int32],  # [num_reqs, K]
    ) -> None:
        """One step: what became of the drafts before, and what was drafted then. See on_device.Parts for its names."""
        rows = self._rows.of(list(request_ids))
        self._sent.make_room(self._rows.num_rows)
        accepted = num_sampled[:, 0] - 1
        fates = self._sent.take(rows, accepted + num_rejected[:, 0], accepted)
        self.gate.add(len(rows), int(num_sampled.sum()), self._has_exited)
        if len(rows):
            self._has_exited = bool(has_exited.any())
        count_fates(self._counters, fates)
        drafts = Drafted(stage, num_draft[:, 0], stage, np.ones(stage.shape))
        self._sent.put(rows, drafts)
        count_drafts(self._counters, drafts)
        for own, num_drafted in zip(self._counters, (looked_up, exited), strict=True):
            own.asked += int(np.count_nonzero(num_drafted >= 0))
            own.drafted += int(num_drafted.clip(0).sum())
        if self._policy == "verify":
            self._counters[0].kept += int(confirmed.sum())
        self._sent.clear(self._rows.forget(self._gone))
        self._gone.clear()

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is held of these requests, when what became of their last drafts has been told, too."""
        self._gone.extend(request_ids)
