"""Model Runner V2: follows drafts on the device until they are verified; learns acceptance probabilities from them.

How likely each token is to be accepted is known there, and what is counted is counted there. The inputs stand in
buffers, where a recorded graph finds them. R: rows of the batch or of a graph, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.cascade.on_device import Parts
from vllm_specplugins.engine.adaptive.budget import Confidences, new_confidences
from vllm_specplugins.engine.v2.feedback.async_copy import AsyncCopy, DraftLengths
from vllm_specplugins.engine.v2.feedback.tally import Tally
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.kernels import acceptance
from vllm_specplugins.kernels.acceptance import Other, Worth, survivals, worth
from vllm_specplugins.kernels.acceptance.reference import clear, new_state
from vllm_specplugins.kernels.steps import Rows, Staged
from vllm_specplugins.structures.arrays import DraftArrays


class DraftTracker:
    """Of all slots of requests. A graph's rows of padding have a slot that is nobody's.

    Args:
        num_stages: of a cascade; 1: a method that is alone.
        max_num_draft: K.
    """

    implementation: str | None = None  # of kernels/acceptance; the reference where a kernel failed its check
    # Where what is learned from is not what was sent, [R] int32 each: 1 and its tokens that were right, others tried.
    fates: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, num_stages: int, req_states: Any, max_num_draft: int, device: torch.device):
        num_slots = req_states.max_num_reqs
        self._req_states, self.device = req_states, device
        self._slots = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        self._num_sampled, self._num_rejected = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self._num_rows, self._rests = 0, False  # of the step before: after its rows all is padding
        self._own = [self._slots, self._num_sampled, self._num_rejected]  # its rows of these
        # How likely each token is to be accepted if those before it are; 0 after a draft's end. By rows.
        self.accept_probs = torch.zeros(num_slots, max_num_draft, dtype=torch.float32, device=device)
        self.confidences = new_confidences(num_slots, max_num_draft, device)
        self._copying: Confidences | None = None  # 1: whose match promises more than a drafter's whole draft
        self._known = new_state(num_stages, num_slots + 1, max_num_draft, device)
        self._num_draft = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.tally = Tally(num_slots, max_num_draft, num_stages if num_stages > 1 else 0, device)

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests."""
        slots = {request.request_id: request.slot for request in requests}
        clear(self._known, async_tensor_h2d(np.array(list(slots.values())), self.device))
        if self._copying is not None:
            self._copying.host[list(slots.values())] = 0.0
        self.tally.start(slots)

    def begin(self, num_reqs: int, *sampled: torch.Tensor) -> None:
        """A step of so many rows: their slots, and what was sampled and rejected, [num_reqs] each; a rehearsal, of
        which nothing is learned, has nobody's rows."""
        nobody, self._rests = self._req_states.max_num_reqs, False
        buffers = self._slots, self._num_sampled, self._num_rejected
        if num_reqs != self._num_rows:
            for buffer, padding in zip(buffers, (nobody, 0, 0), strict=True):
                buffer[num_reqs : self._num_rows].fill_(padding)
            self._own, self._num_rows = [buffer[:num_reqs] for buffer in buffers], num_reqs
        if sampled:
            torch._foreach_copy_(self._own, sampled)
        else:
            for buffer, rehearsed in zip(self._own, (nobody, 1, 0), strict=True):
                buffer.fill_(rehearsed)
        self.tally.begin(bool(sampled))

    def rest(self) -> None:
        """Nothing is drafted: of the next drafts all is expected, so that it is seen what they are worth."""
        if self.confidences is None:
            self.accept_probs.fill_(1.0)
        elif not self._rests:
            self.confidences.newest.fill_(1.0)
        if self.confidences is not None:
            self.confidences.host.fill(1.0)  # again and again: what was under way may come after it
        self._rests = True

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and tokens sampled, [R] each; of padding, any slot and 0."""
        return self._slots[:num_rows].clamp(max=self._req_states.max_num_reqs - 1), self._num_sampled[:num_rows]

    def observe(self, num_rows: int) -> None:
        """What became of the last drafts; once a step, before new ones are rated."""
        slots, *told = self.told(num_rows)
        acceptance.observe(self._known, slots, *(self.fates or told), self.implementation)

    def worth(self, drafts: DraftArrays, copies_from: int | None = None, other: Other | None = None) -> Worth:
        """What drafts are worth beside another stage's. `copies_from`: rows copy whose drafts gain so many tokens."""
        slots, copies = self._slots[: len(drafts.num_draft)], None
        if copies_from is not None and self._copying is not None:
            copies = self._copying.mapped, copies_from
        return worth(self._known, slots, _rated(drafts), other, copies, self.implementation)

    def survivals(self, drafts: DraftArrays) -> torch.Tensor:
        """[R, K]: how likely all tokens of each draft up to each place are accepted."""
        slots = self._slots[: len(drafts.num_draft)]
        survival: torch.Tensor = survivals(self._known, slots, _rated(drafts), self.implementation)
        return survival

    def watch_copies(self) -> None:
        """From now on the host sees which requests copy."""
        self._copying = new_confidences(self._req_states.max_num_reqs, 1, self.device)

    def copies(self, slots: np.ndarray) -> bool:
        """Whether all requests of these slots did when the host last heard of it, a step ago or two."""
        return self._copying is not None and bool(self._copying.host[slots].all())

    def keep(self, drafts: DraftArrays, max_draft: torch.Tensor, rates: bool, parts: Parts | None = None) -> None:
        """Takes a step's drafts, [R], counts them and what became of the last ones, and rates them if asked to.

        `parts`: what each stage of a cascade did.
        """
        num_rows, known, learned, staged = len(max_draft), self._known, drafts, None
        rows, accept_probs = self.told(num_rows), self.accept_probs[:num_rows]
        if parts is not None:
            learned = parts.learned or drafts
            told = parts.looked_up, parts.exited, parts.confirmed
            staged = Staged(known.num_sent, known.sent_stage, *(self.fates or rows[1:]), drafts.stage, *told)
        self.tally.add_rows(rows, max_draft, drafts.num_draft, staged)
        tables = () if self.confidences is None else self.confidences[:2]
        if rates:
            acceptance.predict(known, rows.slots, _rated(learned), accept_probs, self.implementation, tables=tables)
        else:
            for table in tables:
                table[rows.slots] = accept_probs
            if parts is not None:
                known.num_sent[rows.slots], known.sent_stage[rows.slots] = learned.num_draft.int(), learned.stage.int()
        self._num_draft[:num_rows] = drafts.num_draft

    def told(self, num_rows: int) -> Rows:
        """Slots of the rows, tokens sampled, tokens rejected."""
        return Rows(self._slots[:num_rows], self._num_sampled[:num_rows], self._num_rejected[:num_rows])

    def lengths(self, request_ids: Sequence[str]) -> DraftLengths:
        """Begins to copy the lengths of this step's drafts; whoever asks for them waits."""
        return DraftLengths(AsyncCopy(request_ids, self._num_draft[: len(request_ids)]))


def _rated(drafts: DraftArrays) -> acceptance.Drafts:
    """What their acceptance probabilities go by."""
    return acceptance.Drafts(drafts.num_draft, drafts.stage, drafts.confidence)
