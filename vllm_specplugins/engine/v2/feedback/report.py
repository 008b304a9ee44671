"""Model Runner V2: copies data from the device to the host while no step waits, and reports the actual lengths of
drafts to the scheduler; vLLM's handler reports K for each draft."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_specplugins.draft import Int32Array
from vllm_specplugins.engine.messages import DraftLengths


class AsyncCopy:
    """Copies a few numbers per row of a step, [num_reqs, any], to the host. Only the reader waits for the copy."""

    def __init__(self, request_ids: Sequence[str], values: torch.Tensor):
        self.request_ids = list(request_ids)
        self._values = values.to("cpu", non_blocking=True)
        # The runner's platform defines this class; the events of vLLM's CPU worker are always complete. A thread that
        # waits for a blocking event sleeps; otherwise it would keep a core busy.
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def values(self) -> np.ndarray:
        self._arrived.synchronize()
        return self._values.numpy()


class ArrivingLengths(DraftLengths):
    """The numbers of draft tokens of requests, during their copy to the host. Pickling waits for the copy."""

    def __init__(self, arriving: AsyncCopy):
        self._arriving = arriving

    def items(self) -> list[tuple[str, int]]:
        return list(zip(self._arriving.request_ids, self._arriving.values().tolist(), strict=True))

    def __reduce__(self) -> tuple[type, tuple[list[str], list[int]]]:
        return DraftLengths, (self._arriving.request_ids, self._arriving.values().tolist())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled, complete once `arrived` has happened. Row i of `token_ids` [num_reqs, any],
    vLLM's copy, has `num_sampled[i]` valid tokens."""

    request_ids: Sequence[str]
    arrived: Any
    token_ids: Int32Array
    num_sampled: Int32Array

    @classmethod
    def of(cls, output: Any) -> "SampledTokens":
        request_ids = output.model_runner_output.req_ids
        return cls(request_ids, output.copy_event, output.sampled_token_ids, output.num_sampled_tokens_np)

    def tokens(self) -> Iterator[list[int]]:
        for row, count in enumerate(self.num_sampled.tolist()):
            yield self.token_ids[row, :count].tolist()


class DraftReport:
    """A runner's `draft_tokens_handler`.

    Attributes: trims: whether the device trims drafts. Otherwise all drafts have the planned length, and only
        structured output reads them.
    """

    trims: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self) -> None:
        self._lengths: DraftLengths | None = None
        self._rows: Callable[[], list[list[int]]] | None = None

    def tell(self, lengths: DraftLengths | None, rows: Callable[[], list[list[int]]] | None = None) -> None:
        """Accepts the drafts of the step that ends now. If structured output checks them, `rows` returns their tokens,
        possibly with further tokens after a draft's end. Other drafts stay on the device, and have ids of -1."""
        self._lengths, self._rows = lengths, rows

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """Does nothing, since `tell` already has the drafts."""

    def get_draft_tokens(self) -> DraftTokenIds:
        lengths = dict(self._lengths.items() if self._lengths else ())
        rows = self._rows() if self._rows else [[-1] * num for num in lengths.values()]
        return DraftTokenIds(list(lengths), [row[:num] for row, num in zip(rows, lengths.values(), strict=True)])

    def num_draft(self) -> DraftLengths | None:
        """Returns the lengths of drafts, for a scheduler that plans before the drafts exist. It omits the lengths of
        trimmed drafts, since they would shorten the draft of a later step."""
        return None if self.trims() else self._lengths
