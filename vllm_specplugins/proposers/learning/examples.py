"""What becomes of each step's reading: a request's places in a row fill windows, held out or not by request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.proposers.learning.windows import HELD_OUT, LENGTH, Windows
from vllm_specplugins.target import Reading


@dataclass(slots=True)
class _Open:
    """A request's window: its slot, how many places are written, and the position that comes next."""

    is_held_out: bool
    slot: int | None = None
    length: int = 0
    position: int = -1


class Examples:
    """Fills windows. A request with the option `learn` false leaves nothing.

    Args:
        shortest: windows with fewer tokens are dropped.
    """

    def __init__(self, windows: Windows, shortest: int):
        self.num_tokens = 0
        self._windows, self._shortest = windows, shortest
        self._requests: dict[str, _Open] = {}
        self._random = np.random.default_rng(0)

    def add(self, read: Reading) -> None:
        """Takes what was read in a step."""
        slots: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        first = 0
        for index, (request_id, count) in enumerate(zip(read.request_ids, read.counts, strict=True)):
            if read.options[index].get("learn", True) is True:
                for row in range(first, first + count):
                    slot, place = self._place(request_id, index, read.positions[row], read)
                    if slot is not None:
                        slots.append(slot)
                        places.append(place)
                        rows.append(row)
            first += count
        if slots:
            self._windows.write(slots, places, rows, read)
            self.num_tokens += len(slots)
        for request_id in read.request_ids:
            if (own := self._requests.get(request_id)) is not None and own.length == LENGTH:
                self._close(own)

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests are gone; their windows stay."""
        for request_id in request_ids:
            if (own := self._requests.pop(request_id, None)) is not None:
                self._close(own)

    def _place(self, request_id: str, index: int, position: int, read: Reading) -> tuple[int | None, int]:
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = _Open(self._random.random() < HELD_OUT)
        if own.slot is None or own.length == LENGTH or own.position != position:
            self._close(own)
            tenant = hash(read.options[index].get("tenant", b""))
            own.slot = self._windows.open(own.is_held_out, tenant, read.temperatures[index])
        own.position = position + 1
        own.length += own.slot is not None
        return own.slot, own.length - 1

    def _close(self, own: _Open) -> None:
        if own.slot is not None:
            self._windows.close(own.slot, own.length if own.length >= self._shortest else 0)
        own.slot, own.length = None, 0
