"""Model Runner V2: what steps read, for a part that learns from it, without a wait of any step.

A step leaves its states in a ring on the device, beside vLLM's own copy of what it sampled, which is on its way to the
host. The learner's thread reads both when they are there. K: num_speculative_tokens, H: hidden size.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplugins.engine.v2.requests import Request, warms_up
from vllm_specplugins.proposers.learning.exits import ExitStates
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Reading

_MOST_UNREAD = 1024  # steps and news of requests; after more, those that live are not learned from


@dataclass(slots=True)
class _End:
    """The newest token of a request, and its position."""

    request: Request
    position: int
    token_id: int


@dataclass(slots=True)
class _Step:
    """What was sampled, once `sampled` has happened: of rows of token_ids the first num_sampled. Its states are in the
    ring from row `first` on, once `kept` has happened; None: there was no room. `end`: rows ever taken, it included.
    """

    request_ids: Sequence[str]
    token_ids: np.ndarray
    num_sampled: np.ndarray
    sampled: Any
    kept: Any
    first: int
    end: int


class Readings:
    """See the module. `read` alone is called in the learner's thread.

    Args:
        max_num_draft: K.
        like: of the device, the dtype and the H of states, [any, H].
    """

    def __init__(self, learner: Learner, max_num_draft: int, max_num_reqs: int, like: torch.Tensor):
        self._learner, self._width = learner, max_num_draft + 1
        width = like.shape[1] * (1 if learner.exits is None else 2)
        num_rows = max(1, learner.unread_bytes // (width * like.element_size()))
        self._states = like.new_zeros(num_rows, width)
        self._back = torch.arange(max_num_draft, -1, -1, dtype=torch.int32, device=like.device)
        self._row_of = torch.full((max_num_reqs,), -1, device=like.device)  # of a slot, in the last batch
        self._kept: tuple[Any, int, int] = (None, 0, 0)  # of this step, as _Step has it
        self._end = self._done = 0  # rows that were taken, and of them those that may be taken again
        self._news, self._lost = deque[Any](), False  # requests that came, names of those that are gone, steps
        self._ends: dict[str, _End] = {}
        self._gone: list[str] = []

    def add(self, requests: list[Request]) -> None:
        """Takes requests."""
        self._put(requests)

    def remove(self, request_ids: set[str]) -> None:
        """These are gone."""
        if request_ids:
            self._put(request_ids)

    def keep(self, input_batch: Any, hidden_states: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Begins to keep of a step's states, [num_tokens, H], each request's K + 1 up to its last row that stays, and
        what an exit that learns read there when it drafted."""
        num_rows, size, exits = len(last_rows) * self._width, len(self._states), self._learner.exits
        at = self._end % size
        first = self._end if at + num_rows <= size else self._end + size - at
        has_room = self._learner.is_on and first + num_rows - self._done <= size
        if not has_room and exits is None:
            return
        rows = (last_rows.unsqueeze(1) - self._back).clamp_(min=0)
        left = None if exits is None else self._exits_at(exits, input_batch, rows)
        if not has_room:
            return
        at, self._end = first % size, first + num_rows
        kept = self._states[at : at + num_rows]
        if left is not None:
            kept[:, : left.shape[1]] = left
            kept = kept[:, left.shape[1] :]
        torch.index_select(hidden_states, 0, rows.view(-1), out=kept)
        event = torch.cuda.Event()
        event.record()
        self._kept = event, at, self._end

    def _exits_at(self, exits: ExitStates, input_batch: Any, rows: torch.Tensor) -> torch.Tensor:
        """[R * (K + 1), H] of the step's rows [R, K + 1]; from now on the next draft's are awaited."""
        slots, starts = (own[: len(rows)].long() for own in (input_batch.idx_mapping, input_batch.query_start_loc))
        fed = (starts[:, None] + self._back.flip(0)[:-1]).clamp_(max=len(input_batch.input_ids) - 1)
        told = self._row_of[slots], input_batch.input_ids[fed], input_batch.positions[starts]
        found = exits.after(*told, rows - starts[:, None])
        exits.forget()
        self._row_of.fill_(-1)
        self._row_of[slots] = torch.arange(len(rows), device=slots.device)
        return found.flatten(0, 1)

    def note(self, output: Any) -> None:
        """A step is over: takes what it sampled, on its way to the host."""
        request_ids = output.model_runner_output.req_ids
        if not request_ids or warms_up(request_ids):
            return
        self._learner.step()
        sampled = output.sampled_token_ids, output.num_sampled_tokens_np, output.copy_event
        self._put(_Step(request_ids, *sampled, *self._kept))
        self._kept = None, 0, self._end

    def _put(self, news: Any) -> None:
        if not self._learner.is_on:
            return
        if len(self._news) > _MOST_UNREAD:
            self._lost = True
            return
        if self._lost:
            self._news.append(None)
            self._lost = False
        self._news.append(news)

    def read(self) -> Iterator[Reading]:
        """What has arrived since it was last asked."""
        while self._news:
            news = self._news[0]
            if isinstance(news, _Step):
                if not (news.sampled.query() and (news.kept is None or news.kept.query())):
                    return
                if (found := self._reading(news)) is not None:
                    yield found
                self._done = news.end
            elif isinstance(news, list):
                self._ends |= {
                    request.request_id: _End(request, request.num_first - 1, request.last_token_id)
                    for request in news
                    if request.has_token_ids
                }
            else:
                self._gone += news or self._ends
                for request_id in news or list(self._ends):
                    self._ends.pop(request_id, None)
            self._news.popleft()

    def _reading(self, step: _Step) -> Reading | None:
        """And where each request is now; None: nothing was kept."""
        request_ids: list[str] = []
        ends: list[_End] = []
        counts, rows, positions, token_ids, next_ids = (list[int]() for _ in range(5))
        for row, (request_id, count) in enumerate(zip(step.request_ids, step.num_sampled.tolist(), strict=True)):
            end = self._ends.get(request_id)
            if end is None or not count:
                continue
            emitted = step.token_ids[row, :count].tolist()
            request_ids.append(request_id)
            ends.append(end)
            counts.append(count)
            last = step.first + (row + 1) * self._width
            rows += range(last - count, last)
            positions += range(end.position, end.position + count)
            token_ids += [end.token_id, *emitted[:-1]]
            next_ids += emitted
            end.position, end.token_id = end.position + count, emitted[-1]
        if step.kept is None or not rows:
            return None
        states = self._states[torch.tensor(rows, device=self._states.device)]
        copied = torch.cuda.Event(blocking=True)  # before the rows are taken again
        copied.record()
        copied.synchronize()
        gone, self._gone = self._gone, []
        return Reading(
            request_ids,
            [end.request.limits.options for end in ends],
            [end.request.sampling_params.temperature for end in ends],
            counts,
            positions,
            np.array(token_ids, np.int32),
            np.array(next_ids, np.int32),
            states,
            gone,
        )
