"""Model Runner V1: the rows of a step's logits by request. N: rows, B: requests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def metadata_of(device: torch.device, original: Callable[..., Any], num_draft: np.ndarray, ends: np.ndarray) -> Any:
    """vLLM's metadata of a step, from numbers of draft tokens and ends of tokens [B]; faster without drafts."""
    if num_draft.any():
        return original(num_draft, ends)
    arrays = num_draft, np.arange(len(ends) + 1, dtype=np.int32), ends - 1
    zeros, every, last = (torch.from_numpy(array).to(device) for array in arrays)
    return SpecDecodeMetadata(zeros[:0], num_draft.tolist(), zeros, every[1:], zeros[:0], every[:-1], last)


@dataclass(frozen=True)
class Rows:
    """Row i of a request predicts the token after its first i draft tokens."""

    num_draft: list[int]  # of each request
    draft_token_ids: list[int]  # of all requests
    num_tokens: np.ndarray  # [>= B] lengths of prompt and output
    device: torch.device

    @cached_property
    def counts(self) -> np.ndarray:
        return np.asarray(self.num_draft, np.int64) + 1

    @cached_property
    def starts(self) -> np.ndarray:
        """[B + 1] first row of each request, and N."""
        starts = np.zeros(len(self.counts) + 1, np.int64)
        self.counts.cumsum(out=starts[1:])
        return starts

    @cached_property
    def requests(self) -> np.ndarray:
        """[N] the request of each row."""
        return np.arange(len(self.counts)).repeat(self.counts)

    @cached_property
    def steps(self) -> np.ndarray:
        """[N] how many draft tokens a row follows."""
        return np.arange(self.starts[-1]) - self.starts[:-1].repeat(self.counts)

    @cached_property
    def fed(self) -> np.ndarray:
        """[N] the draft token that a row is fed; a request's first row has none."""
        token_ids = np.zeros(self.starts[-1], np.int64)
        if self.draft_token_ids:
            token_ids[self.steps > 0] = self.draft_token_ids
        return token_ids

    @cached_property
    def positions(self) -> np.ndarray:
        """[N] the position of the token that a row predicts."""
        positions: np.ndarray = self.num_tokens[self.requests] + self.steps
        return positions

    @cached_property
    def layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """cu_num_logits, draft_token_ids, positions and idx_mapping of kernels/rejection."""
        arrays = self.starts.astype(np.int32), self.fed, self.positions, np.arange(len(self.counts))
        cu_num_logits, fed, positions, idx_mapping = map(self.as_tensor, arrays)
        return cu_num_logits, fed, positions, idx_mapping

    def as_tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
