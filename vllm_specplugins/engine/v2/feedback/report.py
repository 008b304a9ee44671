"""Model Runner V2: reports the true lengths of a step's drafts to the scheduler; vLLM's handler reports K each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_specplugins.engine.v2.feedback.async_copy import AsyncCopy, DraftLengths

REPORT = "specplugins_num_draft"  # attribute of ModelRunnerOutput: request id -> length of its newest draft


class _Report:
    """A runner's `draft_tokens_handler`. Drafts that no structured output checks stay on the device, with ids of -1."""

    def __init__(self) -> None:
        self._lengths: DraftLengths | dict[str, int] = {}
        self._rows: Callable[[], list[list[int]]] | None = None  # the tokens, perhaps with others after a draft's end

    def tell_none(self, request_ids: Sequence[str]) -> None:
        self._lengths, self._rows = dict.fromkeys(request_ids, 0), None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """Does nothing: `tell` has the drafts already."""

    def get_draft_tokens(self) -> DraftTokenIds:
        lengths = dict(self._lengths.items())
        rows = self._rows() if self._rows else [[-1] * num for num in lengths.values()]
        return DraftTokenIds(list(lengths), [row[:num] for row, num in zip(rows, lengths.values(), strict=True)])

    def num_draft(self) -> DraftLengths | dict[str, int]:
        """The lengths, for a scheduler that plans before the drafts exist."""
        return self._lengths


class DraftReport(_Report):
    """Reports drafts that are on the host."""

    def tell(self, request_ids: Sequence[str], token_ids: Iterable[list[int]]) -> None:
        rows = list(token_ids)
        self._lengths, self._rows = dict(zip(request_ids, map(len, rows), strict=True)), lambda: rows


class LateReport(_Report):
    """Reports drafts made on the device; a reader of their lengths waits for a copy. If drafts are trimmed on the
    device, or always have the planned length, only structured output reads them."""

    trims: Callable[[], bool] = staticmethod(lambda: False)  # whether this holds; set by runner.attach

    def num_draft(self) -> DraftLengths | dict[str, int]:
        """Returns no lengths of trimmed drafts, since they would cut the draft of a later step."""
        return {} if self.trims() else self._lengths

    def tell(self, outcomes: Any, input_batch: Any, drafts: torch.Tensor) -> None:
        """Takes the drafts of the step that ends now, [num_reqs, K] on the device."""
        sees_drafts = input_batch.has_structured_output_reqs
        if sees_drafts or not self.trims():
            self._lengths = outcomes.lengths(input_batch.req_ids)
        self._rows = None
        if sees_drafts:
            tokens = AsyncCopy(input_batch.req_ids, drafts)
            self._rows = lambda: tokens.values().tolist()
