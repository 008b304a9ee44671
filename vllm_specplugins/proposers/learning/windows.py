"""Collects windows of tokens that the target read and emitted, in bounded memory: some for training, others for tests.
Only the learner's thread uses them. R: requests, K: draft tokens, T: tokens of a window, H: hidden size."""

from collections import Counter
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

from vllm_specplugins.target import Reading

LENGTH = 64  # maximum number of tokens of a window
HELD_OUT = 4  # of this number of requests, one request's windows are for tests, and the others for training
MAX_STATE = 2.0**15  # largest number in a state: float16 can represent it, and float32 the sum of its squares
MAX_WINDOWS = 2048  # older text resembles new text less


class ExitStates:
    """The states that an exit read for its newest drafts; a CUDA graph may write them. For an exit of the first layers,
    the target computes the same states in verification."""

    def __init__(self, num_rows: int, max_num_draft: int, hidden_size: int, device: Any, dtype: torch.dtype):
        self.states = torch.zeros(num_rows, max_num_draft, hidden_size, device=device, dtype=dtype)
        self.token_ids = torch.full((num_rows, max_num_draft), -1, device=device)
        self.firsts = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, step: int, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        """Stores one token of each row, [R], with its position and its states [R, H]."""
        num_rows = len(token_ids)
        if step == 0:
            self.clear()
            self.firsts[:num_rows] = positions
        self.states[:num_rows, step], self.token_ids[:num_rows, step] = states, token_ids

    def clear(self) -> None:
        self.token_ids.fill_(-1)

    def after(
        self,
        rows: torch.Tensor,  # [R] int64, each request's row in the last batch; -1: it was not in the batch
        token_ids: torch.Tensor,  # [R, K] that the target read
        firsts: torch.Tensor,  # [R] position of the first of them
        places: torch.Tensor,  # [R, T] int64 indices of these tokens
    ) -> torch.Tensor:
        """Returns the states [R, T, H] of the exit's layer; NaN if the exit did not read the same tokens at the same
        place."""
        num_rows, length = token_ids.shape
        is_known = (self.token_ids[rows] == token_ids) & ((rows >= 0) & (self.firsts[rows] == firsts))[:, None]
        states = torch.where(is_known.cumprod(1)[:, :, None] > 0, self.states[rows], torch.nan)
        places = torch.where((places >= 0) & (places < length), places, length)
        padded = torch.nn.functional.pad(states, (0, 0, 0, 1), value=torch.nan)
        return padded[torch.arange(num_rows, device=rows.device)[:, None], places]


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that the target read and emitted at T consecutive places: `token_ids` [T] int64 and `next_ids` [T]
    int64. `states` are [T, H] after the final norm, or [T, 2 H]: an exit's states, then these."""

    states: torch.Tensor
    token_ids: torch.Tensor
    next_ids: torch.Tensor
    temperature: float
    tenant: int


@dataclass(slots=True, eq=False)
class _Slot:
    """A request's window: the row of its states, the tokens that the target read, and the token after them."""

    row: int
    tenant: int
    temperature: float
    next_position: int
    token_ids: list[int]


class Windows:
    """Fills windows from readings. A new window replaces the oldest window of the tenant with the largest number of
    windows, so a tenant that floods the engine gets at most its share. A request with the option `learn` false fills no
    window. States take about `max_bytes`; windows with fewer than `min_length` tokens are dropped."""

    def __init__(self, max_bytes: int, hidden_size: int, device: Any, dtype: torch.dtype, min_length: int):
        num_rows = min(MAX_WINDOWS, max(8, max_bytes // (LENGTH * hidden_size * dtype.itemsize)))
        with torch.inference_mode(False):
            self._states = torch.zeros(num_rows, LENGTH, hidden_size, device=device, dtype=dtype)
        self._min_length, num_held_out = min_length, max(2, num_rows // HELD_OUT)
        self._free = {True: list(range(num_held_out)), False: list(range(num_held_out, num_rows))}  # by held out or not
        self._finished: dict[bool, list[_Slot]] = {True: [], False: []}
        self._open: dict[str, _Slot] = {}  # by request
        self.num_tokens = self.num_closed = 0

    @property
    def num_bytes(self) -> int:
        return self._states.nbytes

    def add(self, reading: Reading) -> None:
        for request_id in reading.gone:
            self._close(request_id)
        at: list[tuple[int, int, int]] = []  # row of states, place, row of the reading
        owners = np.repeat(np.arange(len(reading.counts)), reading.counts).tolist()
        is_usable = (reading.states.abs().amax(-1) < MAX_STATE).tolist()  # NaN is not, either
        tokens = zip(reading.positions, reading.token_ids.tolist(), reading.next_ids.tolist(), strict=True)
        for row, (owner, (position, token_id, next_id)) in enumerate(zip(owners, tokens, strict=True)):
            if not is_usable[row] or (slot := self._slot_for(reading, owner, position, token_id)) is None:
                continue
            at.append((slot.row, len(slot.token_ids) - 1, row))
            slot.token_ids.append(next_id)
            slot.next_position += 1
            if len(slot.token_ids) > LENGTH:
                self._close(reading.request_ids[owner])
        if at:
            rows, places, sources = torch.tensor(at, device=self._states.device).T
            self._states[rows, places] = reading.states[sources].to(self._states.dtype)
            self.num_tokens += len(at)

    def count(self, is_held_out: bool) -> int:
        return len(self._finished[is_held_out])

    def sample(self, is_held_out: bool, max_windows: int, generator: np.random.Generator) -> list[Window]:
        slots = self._finished[is_held_out]
        return [self._window(slots[index]) for index in generator.permutation(len(slots))[:max_windows].tolist()]

    def blank(self) -> Window:
        return self._window(_Slot(0, 0, 1.0, 0, [0] * (LENGTH + 1)))

    def _window(self, slot: _Slot) -> Window:
        token_ids = torch.tensor(slot.token_ids, device=self._states.device)
        states = self._states[slot.row, : len(token_ids) - 1].clone()
        return Window(states, token_ids[:-1], token_ids[1:], slot.temperature, slot.tenant)

    def _slot_for(self, reading: Reading, owner: int, position: int, token_id: int) -> _Slot | None:
        """Returns the slot for a token, or None if the token is dropped."""
        options, request_id = reading.options[owner], reading.request_ids[owner]
        if options.get("learn", True) is not True:
            return None
        if (slot := self._open.get(request_id)) is not None and slot.next_position == position:
            return slot
        self._close(request_id)
        tenant = hash(options.get("tenant", b""))
        if (row := self._take_row(_is_held_out(request_id), tenant)) is None:
            return None
        slot = self._open[request_id] = _Slot(row, tenant, reading.temperatures[owner], position, [token_id])
        return slot

    def _take_row(self, is_held_out: bool, tenant: int) -> int | None:
        """Returns a free row, or None while all windows are open."""
        finished = self._finished[is_held_out]
        if self._free[is_held_out]:
            return self._free[is_held_out].pop()
        if not finished:
            return None
        counts = Counter(slot.tenant for slot in finished)
        counts[tenant] += 1  # with the new one
        largest = counts.most_common(1)[0][0]
        oldest = next(slot for slot in finished if slot.tenant == largest)
        finished.remove(oldest)
        return oldest.row

    def _close(self, request_id: str) -> None:
        if (slot := self._open.pop(request_id, None)) is None:
            return
        is_held_out = _is_held_out(request_id)
        if len(slot.token_ids) > self._min_length:
            self._finished[is_held_out].append(slot)
            self.num_closed += 1
        else:
            self._free[is_held_out].append(slot.row)


def _is_held_out(request_id: str) -> bool:
    return crc32(request_id.encode()) % HELD_OUT == 0
