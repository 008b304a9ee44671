"""What the verification of both runners shares: the choice of the operation, and the noise of drafts that it needs."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.adjust import Edits, adjust
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


def edit_drafted(
    idx_mapping: torch.Tensor,  # [num_reqs]
    edits: Edits,
    logits: torch.Tensor,  # [num_reqs, vocab_size]
    drafts: torch.Tensor,  # [num_reqs, T]
    positions: torch.Tensor,  # [num_reqs]
) -> torch.Tensor:
    """`draft.Target.edit`, float32, for requests of these states: what verification does to the row behind T drafts."""
    num_reqs, num_drafts = drafts.shape
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=logits.device) * (num_drafts + 1)
    fed = torch.cat((drafts[:, :1], drafts), dim=1) if num_drafts else drafts.new_zeros(num_reqs, 1)
    places = (positions[:, None] + torch.arange(-num_drafts, 1, device=logits.device)).flatten()
    layout = starts, fed.flatten().int(), places, idx_mapping.long()  # as verification's are: no kernel of its own
    edited: torch.Tensor = adjust(logits, *layout, edits, num_drafts, only_last=True)
    return edited
