"""Windows of what the target read and said, in bounded memory: some to train on, some to test on.

The engine's thread writes and the trainer's reads, without a lock: who reads looks again at the end whether the window
is still the same. T: tokens of a window, H: hidden size.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LENGTH = 64  # most tokens of a window
HELD_OUT = 1 / 4  # of the windows
MOST_WINDOWS = 2048  # older text is less like what comes


@dataclass(frozen=True, slots=True)
class Window:
    """What the target read and emitted at T places in a row.

    Args:
        states: [T, H] after the final norm.
        token_ids: [T] int64 that were read.
        next_ids: [T] int64 that were emitted after each.
        temperature: of the request.
        tenant: whose.
    """

    states: torch.Tensor
    token_ids: torch.Tensor
    next_ids: torch.Tensor
    temperature: float
    tenant: int


class Windows:
    """Windows by slot, the first ones held out. Where all are taken, the oldest goes of the tenant that has most: one
    that floods the engine takes no more than its part.

    Args:
        max_bytes: of states.
    """

    def __init__(self, max_bytes: int, hidden_size: int, device: Any, dtype: torch.dtype):
        num_slots = min(MOST_WINDOWS, max(8, max_bytes // (LENGTH * hidden_size * dtype.itemsize)))
        with torch.inference_mode(False):
            self._states = torch.zeros(num_slots, LENGTH, hidden_size, device=device, dtype=dtype)
        self._token_ids = np.zeros((num_slots, LENGTH + 1), np.int64)
        self._lengths = np.zeros(num_slots, np.int64)  # 0: not finished
        self._serials, self._tenants = np.zeros((2, num_slots), np.int64)
        self._temperatures = np.zeros(num_slots)
        self._is_free = np.ones(num_slots, bool)
        self._order = itertools.count(1)
        self._num_held_out = max(2, int(num_slots * HELD_OUT))
        self.num_closed = 0

    @property
    def num_bytes(self) -> int:
        size: int = self._states.numel() * self._states.element_size() + self._token_ids.nbytes
        return size

    def open(self, is_held_out: bool, tenant: int, temperature: float) -> int | None:
        """A slot for a new window; None where all are being written to."""
        first, own = self._own(is_held_out)
        candidates = np.flatnonzero(self._is_free[own])
        if not len(candidates):
            finished = np.flatnonzero(self._lengths[own])
            if not len(finished):
                return None
            tenants = self._tenants[own][finished]
            names, owners, counts = np.unique(tenants, return_inverse=True, return_counts=True)
            counts[names == tenant] += 1  # with the new one
            of_largest = finished[owners == counts.argmax()]
            candidates = of_largest[[self._serials[own][of_largest].argmin()]]
        slot = first + int(candidates[0])
        self._serials[slot], self._lengths[slot], self._is_free[slot] = next(self._order), 0, False
        self._tenants[slot], self._temperatures[slot] = tenant, temperature
        return slot

    def write(self, slots: list[int], places: list[int], rows: list[int], read: Any) -> None:
        """Copies rows of a Reading to places of slots that are open."""
        at, device = (np.array(slots), np.array(places)), self._states.device
        where = torch.from_numpy(np.stack((*at, np.array(rows)))).to(device)
        self._states[where[0], where[1]] = read.states[where[2]].to(self._states.dtype)
        self._token_ids[at] = read.token_ids[rows]
        self._token_ids[at[0], at[1] + 1] = read.next_ids[rows]

    def close(self, slot: int, length: int) -> None:
        """A window is finished, with so many tokens; 0: it is not wanted."""
        self._is_free[slot], self._lengths[slot] = not length, length
        self.num_closed += length > 0

    def count(self, is_held_out: bool) -> int:
        """How many windows there are."""
        return int(np.count_nonzero(self._lengths[self._own(is_held_out)[1]]))

    def sample(self, is_held_out: bool, most: int, generator: np.random.Generator) -> list[int]:
        """Slots of up to so many windows, any."""
        first, own = self._own(is_held_out)
        found = np.flatnonzero(self._lengths[own])
        slots: list[int] = (first + generator.permutation(found)[:most]).tolist()
        return slots

    def read(self, slot: int) -> Window | None:
        """A copy of a window; None where another has taken its place."""
        serial, length = self._serials[slot], int(self._lengths[slot])
        token_ids = torch.from_numpy(self._token_ids[slot, : length + 1].copy()).to(self._states.device)
        window = Window(
            self._states[slot, :length].clone(),
            token_ids[:-1],
            token_ids[1:],
            float(self._temperatures[slot]),
            int(self._tenants[slot]),
        )
        return window if length and serial == self._serials[slot] and length == self._lengths[slot] else None

    def _own(self, is_held_out: bool) -> tuple[int, slice]:
        first = 0 if is_held_out else self._num_held_out
        return first, slice(first, self._num_held_out if is_held_out else None)
