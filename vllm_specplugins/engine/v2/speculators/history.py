"""Model Runner V2: the requests' tokens on the host.

V2 keeps sampled tokens on the device and, with asynchronous scheduling, never shows them to the host. One small copy a
step brings each request's newest tokens, with the lengths.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import Int32Array
from vllm_specplugins.engine.frontend.options import request_options
from vllm_specplugins.isolation.read_only import frozen
from vllm_specplugins.structures.views import view


@dataclass(slots=True)
class Request:
    """A request's history and options."""

    buffer: Int32Array  # [max_model_len]
    shown: Int32Array  # the same, read-only
    num_tokens: int
    options: Any

    @property
    def token_ids(self) -> Int32Array:
        return self.shown[: self.num_tokens]


class Histories:
    """All running requests' histories."""

    def __init__(self, req_states: Any, max_model_len: int, max_num_draft: int, device: torch.device):
        self._req_states = req_states
        self._max_model_len = max_model_len
        self._offsets = torch.arange(-max_num_draft - 1, 0, device=device)
        self._requests: dict[str, Request] = {}

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def add(self, new_requests: Any) -> None:
        """Starts the histories of requests that are new, or back after a preemption."""
        for new in new_requests:
            if new.prompt_embeds is not None:  # some of its tokens have no ids, so it gets no drafts
                continue
            buffer = np.empty(self._max_model_len, np.int32)
            buffer[: len(new.prefill_token_ids)] = new.prefill_token_ids
            options = frozen(request_options(new.sampling_params))
            self._requests[new.req_id] = Request(buffer, view(buffer), len(new.prefill_token_ids), options)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def extend(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> tuple[list[int], Int32Array, Int32Array]:
        """Reads the sampled tokens (waits for the device) and appends them to the histories.

        Returns:
            rows of the batch that sampled a token, and for each how many drafts were accepted and rejected.
        """
        indexes = input_batch.idx_mapping[: input_batch.num_reqs].long()
        total_len = self._req_states.total_len.gpu[indexes]
        positions = (total_len[:, None] + self._offsets).clamp_(min=0)
        newest = self._req_states.all_token_ids.gpu[indexes[:, None], positions]
        columns = (num_sampled[:, None], num_rejected[:, None], total_len[:, None], newest)
        host = torch.cat([column.int() for column in columns], dim=1).cpu().numpy()
        rows = []
        for row, request_id in enumerate(input_batch.req_ids):
            sampled, total = int(host[row, 0]), int(host[row, 2])
            request = self._requests.get(request_id)
            if sampled == 0 or request is None:
                continue
            rows.append(row)
            if request.num_tokens + sampled == total:
                request.buffer[request.num_tokens : total] = host[row, host.shape[1] - sampled :]
            else:
                whole = self._req_states.all_token_ids.gpu[indexes[row], :total]
                request.buffer[:total] = whole.cpu().numpy()
            request.num_tokens = total
        return rows, host[rows, 0] - 1, host[rows, 1]
