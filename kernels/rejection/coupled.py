"""Draft tokens drawn with the noise of their verification.

With a one-hot q a row emits a function of its weights and of the noise of (seed, position): whatever was drafted. So a
proposer may know that noise: it lets its own weights, a guess at the target's, run the same race, and where the guess
is right so is the draft, at any temperature. The output stays the target's, to the token. Its tokens are certain, so q
is kept nowhere. Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding". N:
rows.
"""

import torch

from . import Sampling, rejection_sample


def coupled_sample(
    logits: torch.Tensor,  # [N, vocab_size] bfloat16, float16 or float32
    positions: torch.Tensor,  # [N] int64: where the token that is drawn will stand
    sampling: Sampling,  # of the rows, [N] each
    implementation: str | None = None,
) -> torch.Tensor:
    """Token ids [N] int64: what `rejection_sample` with a one-hot q would emit at rows of these logits.

    Args:
        implementation: as of `rejection_sample`.

    Raises:
        ValueError: as `rejection_sample`.

    >>> coupled_sample(torch.tensor([[0.0, 9.0]]), torch.tensor([5]), Sampling(torch.zeros(1), torch.tensor([7])))
    tensor([1])
    """
    rows = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
    # A request's first row has no draft, so any token will do; the types are those of a step without drafts.
    layout = rows, rows[:-1], positions, rows[:-1].long()
    sampled, _ = rejection_sample(logits, *layout, sampling, max_num_draft=0, implementation=implementation)
    return sampled[:, 0]
