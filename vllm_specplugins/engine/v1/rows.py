"""Model Runner V1: computes the rows of a step's logits by request. N: rows, B: requests."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def metadata_of(device: torch.device, original: Callable[..., Any], num_draft: np.ndarray, ends: np.ndarray) -> Any:
    """Builds vLLM's metadata of a step from the numbers of draft tokens and the ends of tokens [B]; faster without
    drafts."""
    if num_draft.any():
        return original(num_draft, ends)
    arrays = num_draft, np.arange(len(ends) + 1, dtype=np.int32), ends - 1
    zeros, every, last = (torch.from_numpy(array).to(device) for array in arrays)
    return SpecDecodeMetadata(zeros[:0], num_draft.tolist(), zeros, every[1:], zeros[:0], every[:-1], last)


class Rows:
    """Row i of a request predicts the token after its first i draft tokens. `num_tokens`, [>= B], are the lengths of
    prompt and output."""

    def __init__(self, num_draft: list[int], draft_token_ids: list[int], num_tokens: np.ndarray, device: torch.device):
        self.num_draft, self.device = num_draft, device
        self.counts = np.asarray(num_draft, np.int64) + 1
        self.starts = np.zeros(len(self.counts) + 1, np.int64)  # first row of each request, and N
        self.counts.cumsum(out=self.starts[1:])
        self.requests = np.arange(len(self.counts)).repeat(self.counts)  # [N]
        self.steps = np.arange(self.starts[-1]) - self.starts[:-1].repeat(self.counts)  # [N] draft tokens before a row
        self.fed = np.zeros(self.starts[-1], np.int64)  # [N] the draft token that a row reads
        if draft_token_ids:
            self.fed[self.steps > 0] = draft_token_ids
        self.positions: np.ndarray = num_tokens[self.requests] + self.steps  # [N] position that a row predicts

    @cached_property
    def layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns cu_num_logits, draft_token_ids, positions and idx_mapping in the form of kernels/rejection."""
        arrays = self.starts.astype(np.int32), self.fed, self.positions, np.arange(len(self.counts))
        cu_num_logits, fed, positions, idx_mapping = map(self.as_tensor, arrays)
        return cu_num_logits, fed, positions, idx_mapping

    def as_tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
