"""LoRA: layers that draft run each request's own adapter.

vLLM's wrapped layers learn from one mapping, made anew for each step, which row of tokens runs which adapter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class Adapters:
    """Of the requests that are drafted for; of a runner whose next step maps its own tokens again."""

    def __init__(
        self,
        select: Callable[..., None],  # vLLM's: adapters by row of logits, by row of tokens, and what they are
        ids: np.ndarray[Any, np.dtype[np.int32]],  # [num_reqs], 0: none
        requests: set[Any],
    ):
        self._select, self._ids, self._requests = select, ids, requests
        self._length = 0

    def spread(self, length: int) -> None:
        """The next rows are so many tokens of each request."""
        if length == self._length:
            return
        rows = tuple(self._ids.repeat(length).tolist())
        self._select(rows, rows, self._requests)
        self._length = length
