"""What the verification of both runners shares: the choice of the operation, and the noise of drafts that it needs."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.block import block_rejection_sample

OPERATIONS: dict[str, Callable[..., Any]] = {"token": rejection_sample, "block": block_rejection_sample}
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def draft_seeds(seeds: torch.Tensor, num_tokens: torch.Tensor, rejection: str) -> torch.Tensor:
    """Seeds of a step's draft noise, [num_reqs] int64, from the requests' seeds and lengths.

    What "block" rejects depends on drafts further on: it needs noise that no earlier step has drafted with.

    >>> draft_seeds(torch.tensor([7]), torch.tensor([0]), "block"), draft_seeds(torch.tensor([7]), None, "token")
    (tensor([7]), tensor([7]))
    """
    return seeds + num_tokens * _STEP if rejection == "block" else seeds
