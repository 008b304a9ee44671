"""Contains parts of verification for both runners: which package verifies, the random numbers of drafts, and the edits
of logits after a draft."""

import os

import torch

from vllm_specplugins.config import ConfigError, SpecConfig, sample_methods
from vllm_specplugins.kernels.rejection.adjust import Edits, adjust

EDITED_ROWS = 512  # limit of rows that a step with drafts edits at once, in a float32 copy
# Added to a request's seed for its drafts, so that verification uses other random numbers.
DRAFT_NOISE = 0x3C6EF372FE94F82B
_VERIFIER = "VLLM_SPECPLUGINS_VERIFICATION"


def verifies() -> bool:
    """Returns whether this package verifies drafts. VLLM_SPECPLUGINS_VERIFICATION=vllm leaves that to vLLM, for a
    diagnosis."""
    return os.environ.get(_VERIFIER) != "vllm"


def check_verifier(config: SpecConfig) -> None:
    """Raises ConfigError for an invalid variable, and if vLLM is to verify "probabilistic" drafts."""
    if (verifier := os.environ.get(_VERIFIER) or "plugin") not in ("plugin", "vllm"):
        raise ConfigError(f"{_VERIFIER} must be plugin or vllm, not {verifier!r}.")
    if verifier == "vllm" and "probabilistic" in sample_methods(config):
        raise ConfigError(f"{config.method}: {_VERIFIER} must be plugin with 'probabilistic' drafts, not vllm.")


def edit_drafted(
    idx_mapping: torch.Tensor,  # [num_reqs]
    edits: Edits,
    logits: torch.Tensor,  # [N, vocab_size]
    drafts: torch.Tensor,  # [N, T]
    positions: torch.Tensor,  # [N]
    counts: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:
    """Implements `Target.edit` for requests of these states, in float32: verification's edits after T draft tokens, or
    after `counts` tokens, for which it waits for the device."""
    num_rows, num_drafts = drafts.shape
    steps = torch.arange(num_drafts + 1, device=logits.device)
    numbers = drafts.new_full((num_rows,), num_drafts) if counts is None else counts
    fed = torch.cat((drafts[:, :1], drafts), dim=1) if num_drafts else drafts.new_zeros(num_rows, 1)
    edited_positions = (positions - numbers)[:, None] + steps
    is_fed = ... if counts is None else steps <= counts[:, None]
    starts = torch.cat((numbers.new_zeros(1), (numbers + 1).cumsum(0))).int()
    states = idx_mapping.long().repeat_interleave(num_rows // max(1, len(idx_mapping)))
    layout = starts, fed[is_fed].flatten().int(), edited_positions[is_fed].flatten(), states  # verification's layout
    return adjust(logits, *layout, edits, num_drafts, only_last=True)
