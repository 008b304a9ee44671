"""Model Runner V1: passes the target's states of each step to a part that learns."""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.engine.learning import new_learner
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Reading

_MAX_UNREAD = 64  # maximum number of unread steps; later ones are dropped


class Readings:
    """Collects the readings of steps. Only `read` runs in the learner's thread."""

    def __init__(self, runner: Any, learner: Learner):
        self._runner, self._learner = runner, learner
        self._unread = deque[Reading]()
        self._gone: list[str] = []  # requests, since the last reading
        self._drafted_rows: dict[str, int] = {}  # rows of the last batch
        learner.begin(self.read)

    @classmethod
    def of(cls, runner: Any, proposer: Any, target: Any) -> "Readings | None":
        learner = new_learner(proposer, target, runner.vllm_config)
        return None if learner is None else cls(runner, learner)

    def read(self) -> Iterator[Reading]:
        while self._unread:
            yield self._unread.popleft()

    def forget(self, request_ids: Collection[str]) -> None:
        if self._learner.is_on:
            self._gone += sorted(request_ids)

    def on_step(
        self,
        batch: DraftBatch,
        rows: list[int],  # of the runner's batch, [num_reqs]
        num_tokens: np.ndarray,  # [num_reqs]
        num_accepted: np.ndarray,  # [num_reqs]
        hidden_states: torch.Tensor,  # [num_tokens_of_the_step, hidden_size]
        common: Any,  # the step's CommonAttentionMetadata
    ) -> None:
        self._learner.step()
        if self._learner.is_on and len(self._unread) < _MAX_UNREAD:
            self._unread.append(self._reading(batch, rows, num_tokens, num_accepted, hidden_states, common))
        if self._learner.exits is not None:
            self._learner.exits.clear()
            self._drafted_rows = {request_id: row for row, request_id in enumerate(batch.request_ids)}

    def _reading(
        self,
        batch: DraftBatch,
        rows: list[int],
        num_tokens: np.ndarray,
        num_accepted: np.ndarray,
        hidden_states: torch.Tensor,
        common: Any,
    ) -> Reading:
        input_batch, counts = self._runner.input_batch, num_accepted.astype(np.int64) + 1
        firsts = num_tokens.astype(np.int64) - 1 - counts
        starts = common.query_start_loc_cpu[:-1].numpy()[rows] - input_batch.num_computed_tokens_cpu[rows]
        positions = np.concatenate([np.arange(first, first + num) for first, num in zip(firsts, counts, strict=True)])
        owners, places = np.repeat(np.array(rows), counts), positions + np.repeat(starts, counts)
        states = hidden_states[torch.from_numpy(places).to(hidden_states.device)]
        if self._learner.exits is not None:
            states = torch.cat((self._exit_states(batch.request_ids, rows, firsts, counts).to(states), states), dim=1)
        gone, self._gone = self._gone, []
        return Reading(
            request_ids=batch.request_ids,
            options=batch.options,
            temperatures=input_batch.temperature_cpu[rows].tolist(),
            counts=counts.tolist(),
            positions=positions.tolist(),
            token_ids=input_batch.token_ids_cpu[owners, positions],
            next_ids=input_batch.token_ids_cpu[owners, positions + 1],
            states=states,
            gone=gone,
        )

    def _exit_states(self, request_ids: Any, rows: list[int], firsts: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        exits, token_ids = self._learner.exits, self._runner.input_batch.token_ids_cpu
        assert exits is not None
        steps = np.arange(exits.token_ids.shape[1] + 1)
        fed = token_ids[np.array(rows)[:, None], np.minimum(firsts[:, None] + steps[:-1], token_ids.shape[1] - 1)]
        drafted = np.array([self._drafted_rows.get(request_id, -1) for request_id in request_ids])
        arrays = (torch.from_numpy(array).to(exits.states.device) for array in (drafted, fed, firsts, steps[None]))
        return exits.after(*arrays)[torch.from_numpy(steps < counts[:, None])]
