"""Model Runner V2: drafts that are made on the device, and what becomes of them.

How likely each token is to be accepted is known there, and what the host counts is on its way to it. The inputs stand
in buffers, where a recorded graph finds them. R: rows of the batch or of a graph, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.draft import Feedback
from vllm_specplugins.engine.v2.arriving import Arriving, Lengths
from vllm_specplugins.kernels import calibration
from vllm_specplugins.kernels.calibration.state import clear, new_state
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.drafted import Drafted

_SAMPLED, _REJECTED, _WANTED, _DRAFTED = range(4)  # columns of what is counted of a row


class Outcomes:
    """Of all slots of requests. A graph's rows of padding have a slot that is nobody's.

    Args:
        max_num_draft: K.
        num_more: numbers of each row that are told beside those that all are counted by.
    """

    implementation: str | None = None  # of kernels/calibration; the reference where a kernel failed its check

    def __init__(self, num_stages: int, req_states: Any, max_num_draft: int, device: torch.device, num_more: int = 0):
        num_slots = req_states.max_num_reqs
        self._req_states, self.device = req_states, device
        self._slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._num_sampled, self._num_rejected = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self._num_rows = 0  # of the step before: behind them all is padding
        # How likely each token is to be accepted if those before it are; 0 behind a draft's end. By rows.
        self.probs = torch.zeros(num_slots, max_num_draft, dtype=torch.float32, device=device)
        self._known = new_state(num_stages, num_slots + 1, max_num_draft, device)
        self._counts = torch.zeros(num_slots, 4 + num_more, dtype=torch.int32, device=device)
        self._arriving: Arriving | None = None

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        if new_requests:
            slots = np.array([self._req_states.req_id_to_index[new.req_id] for new in new_requests], np.int64)
            clear(self._known, async_tensor_h2d(slots, self.device))

    def begin(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor, rehearses: bool
    ) -> None:
        """Takes what a step has sampled, of [num_reqs] rows; nothing is learned from a rehearsal."""
        num_reqs = len(slots)
        nobody = self._req_states.max_num_reqs
        for buffer, values, padding in (
            (self._slots, slots, nobody), (self._num_sampled, num_sampled, 0), (self._num_rejected, num_rejected, 0)
        ):  # fmt: skip
            buffer[:num_reqs].copy_(values)
            if num_reqs < self._num_rows:
                buffer[num_reqs : self._num_rows].fill_(padding)
        self._num_rows = num_reqs
        if rehearses:
            self._num_sampled.clamp_(max=1)
            self._num_rejected.zero_()

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and tokens sampled, [R] each; of padding, any slot and 0."""
        return self._slots[:num_rows].clamp(max=self._req_states.max_num_reqs - 1), self._num_sampled[:num_rows]

    def learn(self, num_rows: int) -> None:
        """What became of the last drafts; once a step, before new ones are rated."""
        calibration.learn(self._known, *self._told(num_rows), self.implementation)

    def num_worth(self, drafts: Drafted, than: int, depth: int, in_part: bool) -> torch.Tensor:
        """[R] int32: how many tokens of each draft to keep, for most to be accepted, where another stage may draft so
        many; with `in_part` behind those that are kept, else in their stead."""
        slots = self._slots[: len(drafts.num_draft)]
        kept: torch.Tensor = calibration.num_worth(
            self._known, slots, _rated(drafts), than, depth, in_part, self.implementation
        )
        return kept

    def keep(self, drafts: Drafted, wanted: torch.Tensor, rates: bool, more: Sequence[torch.Tensor] = ()) -> None:
        """Takes a step's drafts, [R], and rates them if asked to.

        `more` [R] or [R, any] each: the other numbers of each row.
        """
        num_rows = len(wanted)
        slots, sampled, rejected = self._told(num_rows)
        if rates:
            calibration.predict(self._known, slots, _rated(drafts), self.probs[:num_rows], self.implementation)
        columns = sampled, rejected, wanted, drafts.num_draft, *more
        self._counts[:num_rows] = torch.cat([column.view(num_rows, -1).int() for column in columns], dim=1)

    def _told(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of the rows, tokens sampled, tokens rejected."""
        return self._slots[:num_rows], self._num_sampled[:num_rows], self._num_rejected[:num_rows]

    def send(self, request_ids: Sequence[str]) -> Lengths:
        """Begins to copy this step's counts; the drafts' lengths, which whoever asks for waits for."""
        self._arriving = Arriving(request_ids, self._counts[: len(request_ids)])
        return Lengths(self._arriving, _DRAFTED)

    def count(self, barrier: FaultBarrier) -> tuple[list[str], np.ndarray]:
        """Counts the step before, of which all is on the host by now.

        Returns the names of its rows, but of those in the middle of their prompt, and all their numbers.
        """
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return [], np.zeros((0, self._counts.shape[1]), np.int32)
        values = arriving.values()
        rows = values[:, _SAMPLED] > 0
        sampled, rejected, wanted, drafted = values[rows, :4].T
        request_ids = [name for name, is_in in zip(arriving.request_ids, rows, strict=True) if is_in]
        barrier.count(Feedback(request_ids, sampled - 1 + rejected, sampled - 1))
        barrier.counters.add_drafts(int((wanted > 0).sum()), drafted)
        return request_ids, values[rows]


def _rated(drafts: Drafted) -> calibration.Drafts:
    """What their chances go by."""
    return calibration.Drafts(drafts.num_draft, drafts.stage, drafts.confidence)
