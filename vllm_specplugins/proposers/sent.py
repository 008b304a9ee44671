"""What was drafted last for each request, until it is known what became of it."""

from typing import Any, NamedTuple

from vllm_specplugins.proposers.drafted import Array, Drafted, like, namespace, zeros
from vllm_specplugins.proposers.records import with_room


class Fates(NamedTuple):
    """What became of drafts, R requests. See Drafted for `stage` and `confidence`.

    Args:
        num_draft: [R] tokens that were verified.
        num_accepted: [R]
    """

    stage: Array
    confidence: Array
    num_draft: Array
    num_accepted: Array


class Sent:
    """One row of arrays for each request (see records.Rows)."""

    def __init__(self, width: int, num_rows: int = 1, device: Any = None):
        self._num_draft = zeros((num_rows,), device, "int64")
        self._stage = zeros((num_rows, width), device, "int64")
        self._confidence = zeros((num_rows, width), device)

    def make_room(self, num_rows: int) -> None:
        """For so many requests, on the host."""
        if num_rows > len(self._num_draft):
            self._num_draft, self._stage, self._confidence = (
                with_room(array, num_rows) for array in (self._num_draft, self._stage, self._confidence)
            )

    def put(self, rows: Array, drafts: Drafted) -> None:
        """Keeps the newest drafts, of requests that have these rows."""
        parts = (drafts.num_draft, drafts.stage, drafts.confidence)
        for array, part in zip((self._num_draft, self._stage, self._confidence), parts, strict=True):
            array[rows] = like(part, array)

    def take(self, rows: Array, num_draft: Array, num_accepted: Array) -> Fates:
        """What became of these drafts, whose verified tokens are told; they are not kept any longer."""
        known = namespace(num_draft).minimum(self._num_draft[rows], num_draft)
        self._num_draft[rows] = 0
        return Fates(self._stage[rows], self._confidence[rows], known, num_accepted)

    def clear(self, rows: Array) -> None:
        """Forgets these requests."""
        self._num_draft[rows] = 0
