"""Model Runner V1: hands a part that learns the states that the target computed."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Reading

_MAX_UNREAD = 64  # steps


class Readings:
    """Collects a step's readings in the engine's thread; the learner takes them in its thread."""

    def __init__(self, runner: Any, learner: Learner):
        self._runner, self._learner = runner, learner
        self._unread = deque[Reading]()
        self._gone: list[str] = []  # requests that ended since the last reading
        self._drafted_rows: dict[str, int] = {}  # of requests in the last draft

    def take(self) -> Iterator[Reading]:
        while self._unread:
            yield self._unread.popleft()

    def forget(self, request_ids: Sequence[str]) -> None:
        if self._learner.is_on:
            self._gone += request_ids

    def begin_draft(self, request_ids: Sequence[str]) -> None:
        """Clears the states of the last draft, for one of these requests."""
        if self._learner.exits is not None:
            self._learner.exits.forget()
            self._drafted_rows = {request_id: row for row, request_id in enumerate(request_ids)}

    def step(
        self,
        rows: list[int],  # of the runner's batch
        num_tokens: np.ndarray,  # [num_reqs]
        num_accepted: np.ndarray,  # [num_reqs]
        options: Sequence[Mapping[str, Any]],
        hidden_states: torch.Tensor,  # [num_tokens_of_the_step, hidden_size]
        common: Any,  # the step's CommonAttentionMetadata
    ) -> None:
        """Adds the reading of a step, each row's accepted draft included."""
        self._learner.step()
        if not self._learner.is_on or len(self._unread) >= _MAX_UNREAD:
            return
        input_batch, counts = self._runner.input_batch, num_accepted.astype(np.int64) + 1
        firsts = num_tokens.astype(np.int64) - 1 - counts
        starts = common.query_start_loc_cpu[:-1].numpy()[rows] - input_batch.num_computed_tokens_cpu[rows]
        positions = np.concatenate([np.arange(first, first + num) for first, num in zip(firsts, counts, strict=True)])
        token_rows = np.repeat(np.array(rows), counts)
        of_step = torch.from_numpy(positions + np.repeat(starts, counts)).to(hidden_states.device)
        request_ids, states = [input_batch.req_ids[row] for row in rows], hidden_states[of_step]
        if self._learner.exits is not None:
            early = self._exit_states(self._learner.exits, rows, request_ids, firsts, counts)
            states = torch.cat((early.to(states.dtype), states), dim=1)
        reading = Reading(
            request_ids=request_ids,
            options=options,
            temperatures=input_batch.temperature_cpu[rows].tolist(),
            counts=counts.tolist(),
            positions=positions.tolist(),
            token_ids=input_batch.token_ids_cpu[token_rows, positions],
            next_ids=input_batch.token_ids_cpu[token_rows, positions + 1],
            states=states,
            gone=self._gone,
        )
        self._unread.append(reading)
        self._gone = []

    def _exit_states(
        self, exits: Any, rows: list[int], request_ids: list[str], firsts: np.ndarray, counts: np.ndarray
    ) -> torch.Tensor:
        """The exit's states of the same tokens, NaN where it did not draft from them."""
        token_ids = self._runner.input_batch.token_ids_cpu
        steps = np.arange(exits.token_ids.shape[1] + 1)
        places = np.minimum(firsts[:, None] + steps[:-1], token_ids.shape[1] - 1)
        drafted_rows = np.array([self._drafted_rows.get(request_id, -1) for request_id in request_ids])
        arrays = drafted_rows, token_ids[np.array(rows)[:, None], places], firsts, steps[None]
        states: torch.Tensor = exits.after(*(torch.from_numpy(array).to(exits.states.device) for array in arrays))
        return states[torch.from_numpy(steps < counts[:, None])]
