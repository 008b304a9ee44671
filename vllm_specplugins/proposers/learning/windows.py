"""Windows of what the target read and said, in bounded memory: some to train on, some to test on.

The learner's thread alone comes here. T: tokens of a window, H: hidden size.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

from vllm_specplugins.target import Reading

LENGTH = 64  # most tokens of a window
HELD_OUT = 4  # of so many windows one, by request: none is trained on and tested on
LARGEST = 2.0**15  # number in a state; half precision holds it, and squares of it add up
MOST_WINDOWS = 2048  # older text is less like what comes


@dataclass(frozen=True, slots=True)
class Window:
    """What the target read and emitted at T places in a row.

    Args:
        states: [T, H] after the final norm; before them in a row those of an exit, if it learns: 2 H.
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


@dataclass(slots=True, eq=False)
class _Kept:
    """A request's window: where its states are; the tokens that were read, and the one after them."""

    slot: int
    tenant: int
    temperature: float
    position: int  # that comes next
    token_ids: list[int]


class Windows:
    """Fills windows from readings. Where all slots are taken, the oldest window goes of the tenant that has most: one
    that floods the engine takes no more than its part. A request with the option `learn` false leaves nothing.

    Args:
        max_bytes: of states.
        shortest: windows with fewer tokens are dropped.
    """

    def __init__(self, max_bytes: int, hidden_size: int, device: Any, dtype: torch.dtype, shortest: int):
        num_slots = min(MOST_WINDOWS, max(8, max_bytes // (LENGTH * hidden_size * dtype.itemsize)))
        with torch.inference_mode(False):
            self._states = torch.zeros(num_slots, LENGTH, hidden_size, device=device, dtype=dtype)
        self._shortest, first = shortest, max(2, num_slots // HELD_OUT)
        self._free = {True: list(range(first)), False: list(range(first, num_slots))}  # by whether it is held out
        self._finished: dict[bool, list[_Kept]] = {True: [], False: []}
        self._open: dict[str, _Kept] = {}  # by request
        self.num_tokens = self.num_closed = 0

    @property
    def num_bytes(self) -> int:
        size: int = self._states.numel() * self._states.element_size()
        return size

    def add(self, read: Reading) -> None:
        """Takes what was read in a step."""
        for request_id in read.gone:
            self._close(request_id)
        at: list[tuple[int, int, int]] = []  # slot, place, row
        owners = np.repeat(np.arange(len(read.counts)), read.counts).tolist()
        is_known = (read.states.abs().amax(-1) < LARGEST).tolist()  # NaN is not, either
        tokens = zip(read.positions, read.token_ids.tolist(), read.next_ids.tolist(), strict=True)
        for row, (owner, (position, token_id, next_id)) in enumerate(zip(owners, tokens, strict=True)):
            if not is_known[row] or (kept := self._window(read, owner, position, token_id)) is None:
                continue
            at.append((kept.slot, len(kept.token_ids) - 1, row))
            kept.token_ids.append(next_id)
            kept.position += 1
            if len(kept.token_ids) > LENGTH:
                self._close(read.request_ids[owner])
        if at:
            slots, places, rows = torch.tensor(at, device=self._states.device).T
            self._states[slots, places] = read.states[rows].to(self._states.dtype)
            self.num_tokens += len(at)

    def count(self, is_held_out: bool) -> int:
        """How many windows there are."""
        return len(self._finished[is_held_out])

    def sample(self, is_held_out: bool, most: int, generator: np.random.Generator) -> list[Window]:
        """Copies of up to so many windows, any."""
        found = self._finished[is_held_out]
        return [self._read(found[index]) for index in generator.permutation(len(found))[:most].tolist()]

    def blank(self) -> Window:
        """A window as large as any, of a text that nobody wrote."""
        return self._read(_Kept(0, 0, 1.0, 0, [0] * (LENGTH + 1)))

    def _read(self, kept: _Kept) -> Window:
        token_ids = torch.tensor(kept.token_ids, device=self._states.device)
        states = self._states[kept.slot, : len(token_ids) - 1].clone()
        return Window(states, token_ids[:-1], token_ids[1:], kept.temperature, kept.tenant)

    def _window(self, read: Reading, owner: int, position: int, token_id: int) -> _Kept | None:
        """That a token is written to next; None: to none."""
        options, request_id = read.options[owner], read.request_ids[owner]
        if options.get("learn", True) is not True:
            return None
        if (kept := self._open.get(request_id)) is not None and kept.position == position:
            return kept
        self._close(request_id)
        tenant = hash(options.get("tenant", b""))
        if (slot := self._slot(_is_held_out(request_id), tenant)) is None:
            return None
        kept = self._open[request_id] = _Kept(slot, tenant, read.temperatures[owner], position, [token_id])
        return kept

    def _slot(self, is_held_out: bool, tenant: int) -> int | None:
        """For a new window of a tenant; None where all are being written to."""
        finished = self._finished[is_held_out]
        if self._free[is_held_out]:
            return self._free[is_held_out].pop()
        if not finished:
            return None
        counts = Counter(kept.tenant for kept in finished)
        counts[tenant] += 1  # with the new one
        largest = counts.most_common(1)[0][0]
        oldest = next(kept for kept in finished if kept.tenant == largest)
        finished.remove(oldest)
        return oldest.slot

    def _close(self, request_id: str) -> None:
        """The request's window is finished, if it has one."""
        if (kept := self._open.pop(request_id, None)) is None:
            return
        own = _is_held_out(request_id)
        if len(kept.token_ids) > self._shortest:
            self._finished[own].append(kept)
            self.num_closed += 1
        else:
            self._free[own].append(kept.slot)


def _is_held_out(request_id: str) -> bool:
    return crc32(request_id.encode()) % HELD_OUT == 0
