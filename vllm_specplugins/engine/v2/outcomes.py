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
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.confidence import Calibration
from vllm_specplugins.proposers.drafted import Drafted
from vllm_specplugins.proposers.on_device import num_worth

_SAMPLED, _REJECTED, _WANTED, _DRAFTED = range(4)  # columns of what is counted of a row


class Outcomes:
    """Of all slots of requests. A graph's rows of padding have a slot that is nobody's.

    Args:
        max_num_draft: K.
        num_more: numbers of each row that are told beside those that all are counted by.
    """

    def __init__(self, num_stages: int, req_states: Any, max_num_draft: int, device: torch.device, num_more: int = 0):
        num_slots = req_states.max_num_reqs
        self._req_states, self.device = req_states, device
        self._slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._num_sampled, self._num_rejected = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        # How likely each token is to be accepted if those before it are; 0 behind a draft's end. By rows.
        self.probs = torch.zeros(num_slots, max_num_draft, dtype=torch.float32, device=device)
        self._calibration = Calibration(num_stages, num_slots + 1, max_num_draft, device)
        self._counts = torch.zeros(num_slots, 4 + num_more, dtype=torch.int32, device=device)
        self._arriving: Arriving | None = None

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        if new_requests:
            slots = np.array([self._req_states.req_id_to_index[new.req_id] for new in new_requests], np.int64)
            self._calibration.clear(async_tensor_h2d(slots, self.device))

    def begin(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor, rehearses: bool
    ) -> None:
        """Takes what a step has sampled, of [num_reqs] rows; nothing is learned from a rehearsal."""
        num_reqs = len(slots)
        self._slots[:num_reqs].copy_(slots)
        self._slots[num_reqs:].fill_(self._req_states.max_num_reqs)
        for buffer, values in ((self._num_sampled, num_sampled), (self._num_rejected, num_rejected)):
            buffer[:num_reqs].copy_(values)
            buffer[num_reqs:].zero_()
        if rehearses:
            self._num_sampled.clamp_(max=1)
            self._num_rejected.zero_()

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and tokens sampled, [R] each; of padding, any slot and 0."""
        return self._slots[:num_rows].clamp(max=self._req_states.max_num_reqs - 1), self._num_sampled[:num_rows]

    def learn(self, num_rows: int) -> None:
        """What became of the last drafts; once a step, before new ones are rated."""
        slots, sampled, rejected = (array[:num_rows] for array in (self._slots, self._num_sampled, self._num_rejected))
        num_accepted = (sampled - 1).clamp_(min=0)
        self._calibration.learn(slots, num_accepted + rejected, num_accepted)

    def num_worth(self, drafts: Drafted, than: int, depth: int, in_part: bool) -> torch.Tensor:
        """[R] int64: how many tokens of each draft to keep, for most to be accepted, where another stage may draft so
        many; with `in_part` behind those that are kept, else in their stead."""
        slots = self._slots[: len(drafts.num_draft)]
        survival = self._calibration.chances(slots, drafts).cumprod(dim=1)
        rate = self._calibration.records.rate(slots, than)[:, None]
        return num_worth(survival, rate, drafts.num_draft, depth, in_part)

    def keep(self, drafts: Drafted, wanted: torch.Tensor, rates: bool, more: Sequence[torch.Tensor] = ()) -> None:
        """Takes a step's drafts, [R], and rates them if asked to.

        `more` [R] or [R, any] each: the other numbers of each row.
        """
        num_rows = len(wanted)
        slots, sampled, rejected = (array[:num_rows] for array in (self._slots, self._num_sampled, self._num_rejected))
        if rates:
            self.probs[:num_rows] = self._calibration.predict(slots, drafts)
        columns = sampled, rejected, wanted, drafts.num_draft, *more
        self._counts[:num_rows] = torch.cat([column.view(num_rows, -1).int() for column in columns], dim=1)

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
