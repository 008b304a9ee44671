"""Model Runner V2: tracks drafts on the device until they are verified, counts them, and learns acceptance
probabilities from them, as gate/draft_tracker.py does on the host. A recorded CUDA graph reads the inputs from buffers.
R: rows of the batch or of a graph, K: max draft tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.engine.adaptive.budget import AcceptProbs, new_accept_probs
from vllm_specplugins.engine.v2.feedback.report import ArrivingLengths, AsyncCopy, Tally
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.gate.budget import UNKNOWN
from vllm_specplugins.gate.drafter_length import NEW_REPORT
from vllm_specplugins.kernels import acceptance
from vllm_specplugins.kernels.acceptance import Other, Worth, survivals, worth
from vllm_specplugins.kernels.acceptance.reference import clear, new_state
from vllm_specplugins.kernels.steps import Rows, Staged
from vllm_specplugins.structures.drafts import DraftArrays


class DraftTracker:
    """Tracks the drafts of all request slots. The padding rows of a graph use the slot after the last one.

    Args:
        num_stages: number of stages of a cascade; 1 for a single method.

    Attributes: accept_probs: [rows, K], probabilities of this step's drafts, 0 after a draft's end. shared_probs: the
        same by slot, in memory that the host can also read; None in the cases of new_accept_probs. learned: the
        observed draft, if it differs from the sent one. fates: the last draft's outcome, (accepted + 1, rejected), [R]
        int32 each.
    """

    learned: DraftArrays | None = None
    fates: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, num_stages: int, req_states: Any, max_num_draft: int, device: torch.device):
        num_slots = req_states.max_num_reqs
        self._padding, self.device = num_slots, device
        slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._rows = Rows(slots, *torch.zeros(2, num_slots, dtype=torch.int32, device=device))
        self._num_rows, self._rests = 0, False  # rows of the previous step: later rows are padding
        self._step_rows = list(self._rows)  # without the padding
        self.accept_probs = torch.zeros(num_slots, max_num_draft, dtype=torch.float32, device=device)
        self.shared_probs = new_accept_probs(num_slots, max_num_draft, device)
        self._reports: AcceptProbs | None = None  # reports of `worth`, by slot
        self._state = new_state(num_stages, num_slots + 1, max_num_draft, device)
        self._num_draft = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.tally = Tally(num_slots, max_num_draft, num_stages if num_stages > 1 else 0, device)

    def add(self, requests: Sequence[Request]) -> None:
        slots = {request.request_id: request.slot for request in requests}
        clear(self._state, async_tensor_h2d(np.array(list(slots.values())), self.device))
        if self._reports is not None:
            self._reports.host[list(slots.values())] = NEW_REPORT
        self.tally.start(slots)

    def begin(self, num_reqs: int, *sampled: torch.Tensor) -> None:
        """Begins a step with slots, sampled tokens and rejected tokens, [num_reqs] each. Without them the step is a
        rehearsal, with only padding rows."""
        self._rests = False
        if num_reqs != self._num_rows:
            for buffer, padding in zip(self._rows, (self._padding, 0, 0), strict=True):
                buffer[num_reqs : self._num_rows].fill_(padding)
            self._step_rows, self._num_rows = [buffer[:num_reqs] for buffer in self._rows], num_reqs
        if sampled:
            torch._foreach_copy_(self._step_rows, sampled)
        else:
            for buffer, padding in zip(self._step_rows, (self._padding, 1, 0), strict=True):
                buffer.fill_(padding)
        self.tally.begin(bool(sampled))

    def rest(self) -> None:
        """Records a step without drafts. The next drafts are therefore unknown to the host in their first step."""
        if self.shared_probs is None:
            self.accept_probs.fill_(UNKNOWN)
        else:
            if not self._rests:
                self.shared_probs.newest.fill_(UNKNOWN)
            # In each such step, since an earlier write of the device may arrive later.
            self.shared_probs.host.fill(UNKNOWN)
        self._rests = True

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns slots and numbers of sampled tokens, [R] each. A padding row has any slot and 0 tokens."""
        slots, num_sampled, _ = self.step_rows(num_rows)
        return slots.clamp(max=self._padding - 1), num_sampled

    def step_rows(self, num_rows: int) -> Rows:
        return Rows(*(buffer[:num_rows] for buffer in self._rows))

    def observe(self, num_rows: int) -> None:
        """Learns from the outcome of the last drafts; called once per step, before `keep`."""
        slots, *fates = self.step_rows(num_rows)
        acceptance.observe(self._state, slots, *(self.fates or fates))

    def worth(self, drafts: DraftArrays, other: Other | None = None, reports: bool = False) -> Worth:
        """Compares drafts with another stage. `reports` states whether the host will read the gains and the stage's
        rates."""
        slots, table = self._rows.slots[: len(drafts.num_draft)], None
        if reports and self._reports is not None:
            table = self._reports.mapped
        return worth(self._state, slots, _rated(drafts), other, table)

    def note_worth(self, drafts: DraftArrays) -> None:
        """Reports the gains of drafts to the host."""
        self.worth(drafts, reports=True)

    def survivals(self, drafts: DraftArrays) -> torch.Tensor:
        """Returns the probability that a draft is accepted up to each position, [R, K]."""
        slots = self._rows.slots[: len(drafts.num_draft)]
        return survivals(self._state, slots, _rated(drafts))

    def watch_worth(self) -> None:
        """Makes `worth` report to the host."""
        self._reports = new_accept_probs(self._padding, len(NEW_REPORT), self.device)
        if self._reports is not None:
            self._reports.host[:] = NEW_REPORT

    def reports(self, slots: np.ndarray) -> np.ndarray | None:
        """Returns the reports for expected_gains of these slots, [R, 2], one or two steps old; None if ranks might read
        different ones."""
        return None if self._reports is None else self._reports.host[slots].astype(np.float64)

    def keep(self, drafts: DraftArrays, wanted: torch.Tensor, rates: bool) -> None:
        """Stores a step's drafts, and counts them, the outcome of the last drafts and `wanted` [R], the tokens that
        each row wanted. With `rates` the tracker predicts `accept_probs`; otherwise the caller has filled them in."""
        num_rows, state, staged = len(wanted), self._state, None
        learned = drafts if self.learned is None else self.learned
        rows, accept_probs = self.step_rows(num_rows), self.accept_probs[:num_rows]
        if drafts.by_stage:
            sent = state.num_sent, state.sent_stage
            staged = Staged(*sent, *(self.fates or rows[1:]), drafts.stage, *drafts.by_stage)
        self.tally.add_rows(rows, wanted, drafts.num_draft, staged)
        tables = () if self.shared_probs is None else self.shared_probs[:2]
        if rates:
            acceptance.predict(state, rows.slots, _rated(learned), accept_probs, tables=tables)
        else:
            for table in tables:
                table[rows.slots] = accept_probs
            if drafts.by_stage:
                state.num_sent[rows.slots], state.sent_stage[rows.slots] = learned.num_draft.int(), learned.stage.int()
        self._num_draft[:num_rows] = drafts.num_draft

    def lengths(self, request_ids: Sequence[str]) -> ArrivingLengths:
        return ArrivingLengths(AsyncCopy(request_ids, self._num_draft[: len(request_ids)]))


def _rated(drafts: DraftArrays) -> acceptance.Drafts:
    return acceptance.Drafts(drafts.num_draft, drafts.stage, drafts.confidence)
