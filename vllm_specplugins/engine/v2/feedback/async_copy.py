"""Model Runner V2: copies from the device to the host that no step waits for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import Int32Array


class AsyncCopy:
    """Copies a few numbers per row of a step, [num_reqs, any], to the host. Only the reader waits."""

    def __init__(self, request_ids: Sequence[str], values: torch.Tensor):
        self.request_ids = list(request_ids)
        self._values = values.to("cpu", non_blocking=True)
        # The runner's platform defines this class; the events of vLLM's CPU worker have always happened. A thread that
        # waits for a blocking event sleeps; for another one it would spin on a core.
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def values(self) -> np.ndarray:
        self._arrived.synchronize()
        return self._values.numpy()


class DraftLengths:
    """The number of draft tokens of each request, which is still being copied. Pickling turns it into a dictionary."""

    def __init__(self, arriving: AsyncCopy):
        self._arriving = arriving

    def items(self) -> list[tuple[str, int]]:
        return list(zip(self._arriving.request_ids, self._arriving.values().tolist(), strict=True))

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, (dict(self.items()),)


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
