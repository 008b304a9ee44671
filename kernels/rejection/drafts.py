"""Draft tokens drawn under the requests' own parameters, with the noise of their verification or with other noise.

With a one-hot q a row emits a function of its weights and of the noise of (seed, position): whatever was drafted. So a
proposer may know that noise: it lets its own weights, a guess at the target's, run the same race, and where the guess
is right so is the draft, at any temperature. The output stays the target's, to the token. Its tokens are certain, so q
is kept nowhere. Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding". With
other noise a draft is a sample of q, which verification has to know: what is cut from p is cut from q, too. N: rows.
"""

import torch

from ..implementations import implementation_of
from . import Layout, Sampling, rejection_sample
from .reference import truncated


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
    layout = _layout(positions)
    sampled, _ = rejection_sample(logits, *layout[:4], sampling, max_num_draft=0, implementation=implementation)
    return sampled[:, 0]


def sample_with_q(
    logits: torch.Tensor,  # [N, vocab_size], as above
    positions: torch.Tensor,
    sampling: Sampling,  # whose seeds verification does not draw with
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N] int64, and the logits [N, vocab_size] that they were drawn from: -inf where a limit cuts.

    Args:
        implementation: as of `rejection_sample`.

    Raises:
        ValueError: as `rejection_sample`.

    >>> seeds, top_k = torch.tensor([7]), torch.tensor([1])
    >>> sample_with_q(torch.tensor([[0.0, 9.0]]), torch.tensor([5]), Sampling(torch.ones(1), seeds, top_k))
    (tensor([1]), tensor([[-inf, 9.]]))
    """
    if sampling.truncates and implementation_of(logits, implementation, "host") == "fused":
        from . import fused

        sampled, *_, limit = fused.rejection_sample(logits, _layout(positions), sampling, 0)
        return sampled[:, 0], logits.masked_fill(logits < limit, -torch.inf)
    kept = truncated(logits, sampling)
    whole = Sampling(sampling.temperature, sampling.seeds)
    return coupled_sample(kept, positions, whole, implementation), kept


def _layout(positions: torch.Tensor) -> Layout:
    """A request's first row has no draft, so any token will do; the types are those of a step without drafts."""
    rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return Layout(rows, rows[:-1], positions, rows[:-1].long())
