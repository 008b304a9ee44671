"""Model Runner V2: drafts with another package's `device.DeviceProposer`. After an exception, or an invalid result, it
drafts nothing until the engine starts again, since no Python runs in a recorded graph. Requests continue. With several
ranks, which must draft alike, a fault ends the process."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_specplugins.device import DeviceTexts, checked_draft
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.isolation.faults import DID, fault_of, logger
from vllm_specplugins.isolation.guard import end_all_ranks
from vllm_specplugins.kernels.history_match import LONGEST_MATCH, Match
from vllm_specplugins.structures.drafts import columns


class CustomDrafts:
    """The drafts of such a proposer, as a part of the first source on the device."""

    proposer: Any  # set by Lookups.new_proposer, as num_ranks
    num_ranks = 1
    stop: Callable[[], None]  # the speculator's `stop`; set by DeviceSpeculator.attach

    def __init__(self, req_states: Any, max_num_draft: int, vocab_size: int):
        self._texts = DeviceTexts(req_states.all_token_ids.gpu, req_states.total_len.gpu)
        self._max_num_draft, self._vocab_size, self._has_failed = max_num_draft, vocab_size, False

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            start = request.request_id, request.slot, request.limits.options
            self._call(lambda start=start: self.proposer.start(*start))  # type: ignore[misc]

    def remove(self, request_ids: Iterable[str]) -> None:
        if gone := sorted(request_ids):
            self._call(lambda: self.proposer.forget(gone))

    def probe(self) -> None:
        """Drafts once in a separate capture, since a wait would end the capture of a graph with everything in it."""
        rows = torch.zeros_like(self._texts.lengths[:1], dtype=torch.int64)
        room, found = rows.int() + self._max_num_draft, list[Exception]()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                try:
                    self.proposer.draft(self._texts, rows, room)
                except Exception as error:
                    found.append(error)
        except Exception as error:  # the stream may no longer be captured
            found.append(error)
        if found:
            self._fail(found[0])

    def match(self, slots: torch.Tensor, limits: torch.Tensor, longest: int | None) -> Match:
        """Returns the draft of each row as a match, cut at limits [R] and before a token outside the vocabulary."""
        zeros = slots.new_zeros(len(slots), self._max_num_draft, dtype=torch.int32)
        rows = slots.clamp(max=len(self._texts.lengths) - 1)
        given = self._texts, rows, limits
        drafted = self._call(lambda: checked_draft(self.proposer.draft(*given), limits, self._max_num_draft))
        if drafted is None:
            return zeros, limits * 0, limits * 0.0 + 1
        token_ids, num_draft, confidence = drafted.token_ids, drafted.num_draft, drafted.confidence
        exists = ((token_ids >= 0) & (token_ids < self._vocab_size)).int().cumprod(dim=1)
        num_draft = num_draft.minimum(limits).minimum(exists.sum(dim=1)).clamp(min=0).to(limits.dtype)
        is_drafted = columns(token_ids) < num_draft[:, None]
        zeros[:, : token_ids.shape[1]] = token_ids.masked_fill(~is_drafted, 0)
        confidence = limits * 0.0 + 1 if confidence is None else confidence.float().nan_to_num(1.0)
        return zeros, num_draft, confidence.clamp(0, LONGEST_MATCH)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Returns the proposer's result, or None after a fault."""
        if self._has_failed:
            return None
        try:
            return function()
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        fault, self._has_failed = fault_of(error, ()), True
        if self.num_ranks > 1:
            end_all_ranks("The proposer", fault)
        words = "The proposer %s on the device (%s). Requests continue; it drafts again after a restart."
        logger.error(words, DID[fault.kind], fault.cause)
        self.stop()
