"""Model Runner V2: passes the target's states of each step to a part that learns, while no step waits. A step copies
its states into a ring on the device, and vLLM copies the sampled tokens to the host; the learner's thread reads both
once they have arrived. R: requests, K: num_speculative_tokens, H: hidden size."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplugins.engine.hooks import both
from vllm_specplugins.engine.learning import new_learner
from vllm_specplugins.engine.v2.feedback.report import SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.learning.windows import ExitStates
from vllm_specplugins.target import Reading

_MAX_UNREAD = 1024  # maximum number of unread steps and changes of requests; then all live requests are dropped


def attach(runner: Any, speculator: Any) -> None:
    """Creates a learner if any part of the speculator's proposer learns. It observes the runner once the target is
    loaded."""

    def loaded() -> None:
        target = runner.model
        if (learner := new_learner(speculator.session.barrier.proposer, target, runner.vllm_config)) is None:
            return
        shape = runner.max_num_reqs, runner.num_speculative_steps, runner.model_config.get_hidden_size()
        speculator.watchers.append(Readings(learner, *shape, runner.device, runner.model_config.dtype))
        runner.profile_run = both(runner.profile_run, lambda *_, **__: learner.rehearse())

    speculator.session.when_loaded = loaded


@dataclass(slots=True)
class _End:
    request: Request
    position: int
    token_id: int


@dataclass(slots=True)
class _States:
    """A step's R * (K + 1) rows in the ring from `first` on; `end` counts all rows taken up to this step. `arrived` is
    the event after the copy, or None if the ring had no room."""

    arrived: Any
    first: int
    end: int


class Readings:
    """Collects the readings of steps. Only `read` runs in the learner's thread."""

    def __init__(
        self,
        learner: Learner,
        max_num_reqs: int,
        max_num_draft: int,
        hidden_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._learner, self._width = learner, max_num_draft + 1
        row_size = hidden_size * (1 if learner.exits is None else 2)
        num_rows = max(1, learner.unread_bytes // (row_size * dtype.itemsize))
        self._ring = torch.zeros(num_rows, row_size, device=device, dtype=dtype)
        self._back = torch.arange(max_num_draft, -1, -1, dtype=torch.int32, device=device)
        self._row_of = torch.full((max_num_reqs,), -1, device=device)  # row of each slot, in the last batch
        self._states = _States(None, 0, 0)  # of this step
        self._num_taken = self._num_read = 0  # rows of the ring, over all steps
        # New requests, ids of ended requests, and steps; None: all live requests were dropped.
        self._unread, self._has_dropped = deque[Any](), False
        self._ends: dict[str, _End] = {}
        self._gone: list[str] = []
        learner.begin(self.read)

    def add(self, requests: list[Request]) -> None:
        self._put(requests)

    def remove(self, request_ids: set[str]) -> None:
        if request_ids:
            self._put(request_ids)

    def on_step(self, input_batch: Any, hidden_states: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Starts to copy K + 1 states of each request in a step, from [num_tokens, H] and up to its last accepted row,
        and the states that an exit has read for the same tokens."""
        num_rows, size, exits = len(last_rows) * self._width, len(self._ring), self._learner.exits
        at = self._num_taken % size
        start = self._num_taken if at + num_rows <= size else self._num_taken + size - at
        has_room = self._learner.is_on and start + num_rows - self._num_read <= size
        if not has_room and exits is None:
            return
        rows = (last_rows.unsqueeze(1) - self._back).clamp_(min=0)
        exit_states = None if exits is None else self._exit_states(exits, input_batch, rows)
        if not has_room:
            return
        first, self._num_taken = start % size, start + num_rows
        room = self._ring[first : first + num_rows]
        if exit_states is not None:
            room[:, : exit_states.shape[1]] = exit_states
            room = room[:, exit_states.shape[1] :]
        torch.index_select(hidden_states, 0, rows.view(-1), out=room)
        event = torch.cuda.Event()
        event.record()
        self._states = _States(event, first, self._num_taken)

    def _exit_states(self, exits: ExitStates, input_batch: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns [R * (K + 1), H] for a step's rows [R, K + 1], and expects the next drafts."""
        slots, starts = input_batch.idx_mapping[: len(rows)].long(), input_batch.query_start_loc[: len(rows)].long()
        fed = (starts[:, None] + self._back.flip(0)[:-1]).clamp_(max=len(input_batch.input_ids) - 1)
        drafts = self._row_of[slots], input_batch.input_ids[fed], input_batch.positions[starts]
        states = exits.after(*drafts, rows - starts[:, None])
        exits.clear()
        self._row_of.fill_(-1)
        self._row_of[slots] = torch.arange(len(rows), device=slots.device)
        return states.flatten(0, 1)

    def note(self, sampled: SampledTokens) -> None:
        if not sampled.request_ids:
            return
        self._learner.step()
        self._put((sampled, self._states))
        self._states = _States(None, 0, self._num_taken)

    def _put(self, change: Any) -> None:
        if not self._learner.is_on:
            return
        if len(self._unread) > _MAX_UNREAD:
            self._has_dropped = True
            return
        if self._has_dropped:
            self._unread.append(None)
            self._has_dropped = False
        self._unread.append(change)

    def read(self) -> Iterator[Reading]:
        """Yields the readings of steps that have arrived since the last call."""
        while self._unread:
            change = self._unread[0]
            if isinstance(change, tuple):
                sampled, states = change
                if not (sampled.arrived.query() and (states.arrived is None or states.arrived.query())):
                    return
                if (reading := self._reading(sampled, states)) is not None:
                    yield reading
                self._num_read = states.end
            elif isinstance(change, list):
                ends = (_End(request, request.num_first - 1, request.last_token_id) for request in change)
                self._ends |= {end.request.request_id: end for end in ends if end.request.has_token_ids}
            else:
                self._forget(change or list(self._ends))
            self._unread.popleft()

    def _forget(self, request_ids: Collection[str]) -> None:
        self._gone += request_ids
        for request_id in request_ids:
            self._ends.pop(request_id, None)

    def _reading(self, sampled: SampledTokens, states: _States) -> Reading | None:
        """Returns the reading of a step, or None if the ring lacks its states. Advances each request's end."""
        ends: list[_End] = []
        counts, rows, positions, token_ids, next_ids = (list[int]() for _ in range(5))
        for row, emitted in enumerate(sampled.tokens()):
            end = self._ends.get(sampled.request_ids[row])
            if end is None or not emitted:
                continue
            count, last = len(emitted), states.first + (row + 1) * self._width
            ends.append(end)
            counts.append(count)
            rows += range(last - count, last)
            positions += range(end.position, end.position + count)
            token_ids += [end.token_id, *emitted[:-1]]
            next_ids += emitted
            end.position, end.token_id = end.position + count, emitted[-1]
        if states.arrived is None or not rows:
            return None
        copy = self._ring[torch.tensor(rows, device=self._ring.device)]
        copied = torch.cuda.Event(blocking=True)  # before other steps use the rows
        copied.record()
        copied.synchronize()
        gone, self._gone = self._gone, []
        return Reading(
            [end.request.request_id for end in ends],
            [end.request.limits.options for end in ends],
            [end.request.sampling_params.temperature for end in ends],
            counts,
            positions,
            np.array(token_ids, np.int32),
            np.array(next_ids, np.int32),
            copy,
            gone,
        )
