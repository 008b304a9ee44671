"""Model Runner V2: what the scheduler is told of a step's drafts. vLLM's own handler reports K for every request."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_specplugins.engine.v2.feedback.async_copy import AsyncCopy, DraftLengths

REPORT = "specplugins_num_draft"  # attribute of ModelRunnerOutput: request id -> length of its newest draft

_WARM_UP = ("_warmup_", "_v2_")  # how the names of the requests begin with which vLLM warms up


def warms_up(request_ids: Sequence[str]) -> bool:
    """Whether a batch is one of vLLM's own, that nobody waits for and nobody learns from; it is never mixed."""
    return bool(request_ids) and request_ids[0].startswith(_WARM_UP)


class DraftReport:
    """A runner's `draft_tokens_handler` that reports true lengths.

    Where no grammar has to check them, the token ids may be any numbers: the drafts themselves stay on the device.
    """

    def __init__(self) -> None:
        self._token_ids: dict[str, list[int]] = {}

    def tell(self, request_ids: Sequence[str], token_ids: Iterable[list[int]]) -> None:
        """The drafts of the step that is just being finished."""
        self._token_ids = dict(zip(request_ids, token_ids, strict=True))

    def tell_none(self, request_ids: Sequence[str]) -> None:
        """Where nothing is drafted."""
        self.tell(request_ids, [[]] * len(request_ids))

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """The runner's note of what it just got from `propose`; `tell` has said it already."""

    def get_draft_tokens(self) -> DraftTokenIds:
        """For a scheduler that plans after the drafts."""
        return DraftTokenIds(list(self._token_ids), list(self._token_ids.values()))

    def num_draft(self) -> dict[str, int]:
        """For a scheduler that plans before the drafts exist."""
        return {request_id: len(tokens) for request_id, tokens in self._token_ids.items()}


class LateReport:
    """The same of drafts that were made on the device: their lengths are on their way, and whoever asks waits.

    Where drafts are trimmed on the device nobody asks, but for a grammar.
    """

    trims: Callable[[], bool] = staticmethod(lambda: False)  # set by runner.attach

    def __init__(self) -> None:
        self._lengths: DraftLengths | dict[str, int] = {}
        self._tokens: AsyncCopy | None = None  # where a grammar has to see them

    def tell(self, outcomes: Any, input_batch: Any, drafts: torch.Tensor) -> None:
        """The drafts of the step that is just being finished, [num_reqs, K] on the device."""
        sees_drafts = input_batch.has_structured_output_reqs
        if sees_drafts or not self.trims():
            self._lengths = outcomes.lengths(input_batch.req_ids)
        self._tokens = AsyncCopy(input_batch.req_ids, drafts) if sees_drafts else None

    def tell_none(self, request_ids: Sequence[str]) -> None:
        """Where nothing is drafted."""
        self._lengths, self._tokens = dict.fromkeys(request_ids, 0), None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """As above."""

    def get_draft_tokens(self) -> DraftTokenIds:
        """For a scheduler that plans after the drafts, or has to check them."""
        lengths = dict(self._lengths.items())
        if self._tokens is None:
            return DraftTokenIds(list(lengths), [[-1] * num for num in lengths.values()])
        rows = self._tokens.values().tolist()
        return DraftTokenIds(list(lengths), [row[:num] for row, num in zip(rows, lengths.values(), strict=True)])

    def num_draft(self) -> DraftLengths | dict[str, int]:
        """For a scheduler that plans before the drafts exist."""
        return self._lengths
