"""Model Runner V2: copies of a few numbers of each row of a step to the host, which nothing waits for."""

from collections.abc import Sequence

import numpy as np
import torch


class AsyncCopy:
    """A copy that was begun, and that only who looks at it waits for.

    Args:
        request_ids: the rows of the step.
        values: [num_reqs, any] on the device.
    """

    def __init__(self, request_ids: Sequence[str], values: torch.Tensor):
        self.request_ids = list(request_ids)
        self._values = values.to("cpu", non_blocking=True)
        # The runner's platform defines this class; the events of vLLM's CPU worker have always happened. Who waits for
        # a blocking event sleeps; else that thread would spin on a core.
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def values(self) -> np.ndarray:
        """The numbers, [num_reqs, any]; waits until they are there."""
        self._arrived.synchronize()
        return self._values.numpy()


class DraftLengths:
    """How many tokens were drafted for each request, on their way: a dictionary to whoever iterates it or has it
    sent to another process."""

    def __init__(self, arriving: AsyncCopy):
        self._arriving = arriving

    def items(self) -> list[tuple[str, int]]:
        """By request; waits for the numbers."""
        return list(zip(self._arriving.request_ids, self._arriving.values().tolist(), strict=True))

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, (dict(self.items()),)
