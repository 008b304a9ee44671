"""Model Runner V2: what the scheduler is told of a step's drafts. vLLM's own handler reports K for every request."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_specplugins.engine.v2.feedback.async_copy import AsyncCopy, DraftLengths

REPORT = "specplugins_num_draft"  # attribute of ModelRunnerOutput: request id -> length of its newest draft


class _Report:
    """A runner's `draft_tokens_handler` that reports true lengths: vLLM's own reports K for every request.

    Where no grammar has to check them, the token ids may be any numbers: the drafts themselves stay on the device.
    """

    def __init__(self) -> None:
        self._lengths: DraftLengths | dict[str, int] = {}
        self._rows: Callable[[], list[list[int]]] | None = None  # the tokens, and maybe others after a draft's end

    def tell_none(self, request_ids: Sequence[str]) -> None:
        """Where nothing is drafted."""
        self._lengths, self._rows = dict.fromkeys(request_ids, 0), None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """The runner's note of what it just got from `propose`; `tell` has said it already."""

    def get_draft_tokens(self) -> DraftTokenIds:
        """For a scheduler that plans after the drafts, or has to check them."""
        lengths = dict(self._lengths.items())
        rows = self._rows() if self._rows else [[-1] * num for num in lengths.values()]
        return DraftTokenIds(list(lengths), [row[:num] for row, num in zip(rows, lengths.values(), strict=True)])

    def num_draft(self) -> DraftLengths | dict[str, int]:
        """For a scheduler that plans before the drafts exist."""
        return self._lengths


class DraftReport(_Report):
    """Of drafts that the host knows."""

    def tell(self, request_ids: Sequence[str], token_ids: Iterable[list[int]]) -> None:
        """The drafts of the step that is just being finished."""
        rows = list(token_ids)
        self._lengths, self._rows = dict(zip(request_ids, map(len, rows), strict=True)), lambda: rows


class LateReport(_Report):
    """Of drafts that were made on the device: their lengths are on their way, and whoever asks waits.

    Where drafts are trimmed on the device, or all as long as was asked, nobody asks, but for a grammar.
    """

    trims: Callable[[], bool] = staticmethod(lambda: False)  # whether that is so; set by runner.attach

    def num_draft(self) -> DraftLengths | dict[str, int]:
        """None there: of a step later than that of a tree, they would cut it."""
        return {} if self.trims() else self._lengths

    def tell(self, outcomes: Any, input_batch: Any, drafts: torch.Tensor) -> None:
        """The drafts of the step that is just being finished, [num_reqs, K] on the device."""
        sees_drafts = input_batch.has_structured_output_reqs
        if sees_drafts or not self.trims():
            self._lengths = outcomes.lengths(input_batch.req_ids)
        self._rows = None
        if sees_drafts:
            tokens = AsyncCopy(input_batch.req_ids, drafts)
            self._rows = lambda: tokens.values().tolist()
