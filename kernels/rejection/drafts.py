"""Draws draft tokens under the requests' sampling parameters, coupled with verification or as samples of q. N: rows.

With a one-hot q, the token that a row emits is a function of its weights and of the noise of (seed, position), and does
not depend on the draft. A proposer that runs the same race with an estimate of the target's weights drafts the emitted
token whenever the estimate is right, at any temperature. No q is stored. Daliri et al. 2024, "Coupling without
Communication and Drafter-Invariant Speculative Decoding". With other noise a draft is a sample of q, truncated by the
limits of p, and verification needs q.
"""

import torch

from ..implementations import implementation_of
from . import Layout, Sampling, rejection_sample
from .noise import GROUP, TOKEN, exponential, keys
from .reference import GROUP_SIZE, group_sums, truncated


def coupled_sample(
    logits: torch.Tensor,  # [N, vocab_size] bfloat16, float16 or float32
    positions: torch.Tensor,  # [N] int64 of the drawn tokens
    sampling: Sampling,  # of the rows, [N] each
    implementation: str | None = None,
) -> torch.Tensor:
    """Returns the token ids [N] int64 that `rejection_sample` with a one-hot q would emit at rows of these logits.
    Here and below, implementations and errors are those of `rejection_sample`.

    >>> coupled_sample(torch.tensor([[0.0, 9.0]]), torch.tensor([5]), Sampling(torch.zeros(1), torch.tensor([7])))
    tensor([1])
    """
    layout = _layout(positions)
    sampled, _ = rejection_sample(logits, *layout[:4], sampling, max_num_draft=0, implementation=implementation)
    return sampled[:, 0]


def largest_probs_of(
    logits: torch.Tensor,  # [N, vocab_size]
    temperature: torch.Tensor,  # [N], 0 counts as 1
) -> torch.Tensor:
    """Returns the largest probability of each row before truncation, [N] float32.

    >>> largest_probs_of(torch.tensor([[0.75, 0.25]]).log(), torch.zeros(1))
    tensor([0.7500])
    """
    logits = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp_()


def rated_sample(
    logits: torch.Tensor,  # as of coupled_sample, as all below
    positions: torch.Tensor,
    sampling: Sampling,
    greedy: bool = False,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of `coupled_sample`, or the argmax if `greedy`, and `largest_probs_of`. A GPU computes both in
    the same launches.

    >>> rated_sample(torch.tensor([[0.75, 0.25]]).log(), torch.tensor([5]), Sampling(torch.zeros(1), torch.tensor([7])))
    (tensor([0]), tensor([0.7500]))
    """
    if implementation_of(logits, implementation, "host") == "fused":
        from . import fused

        return fused.rated_sample(logits, _layout(positions), sampling, greedy)
    sampled = logits.argmax(dim=-1) if greedy else coupled_sample(logits, positions, sampling, implementation)
    return sampled, largest_probs_of(logits, sampling.temperature)


def race_logprobs(
    logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling, implementation: str | None = None
) -> torch.Tensor:
    """Returns log-probabilities [N, vocab_size] that each token wins the race of `coupled_sample` if the true logits
    are close to these: the softmax of a token's distance to the winner, or of the logits at temperature 0. Nothing
    waits for the device.

    >>> race_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([5]), Sampling(torch.zeros(1), torch.tensor([7]))).exp()
    tensor([[0.2689, 0.7311]])
    """
    (num_rows, vocab_size), greedy = logits.shape, (sampling.temperature == 0)[:, None]
    below = cut(logits, positions, sampling, implementation)[0].float().nan_to_num(-torch.inf, neginf=-torch.inf)
    below = below - below.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(below.dtype).min)
    weights = (below / sampling.temperature.masked_fill(greedy[:, 0], 1.0)[:, None]).exp()
    group_keys, token_keys = (keys(sampling.seeds, positions, stream)[:, None] for stream in (GROUP, TOKEN))
    tokens, groups = (torch.arange(size, device=logits.device) for size in (vocab_size, -(-vocab_size // GROUP_SIZE)))
    arrives = (weights / exponential(token_keys, tokens)).log()
    padded = torch.nn.functional.pad(arrives, (0, len(groups) * GROUP_SIZE - vocab_size), value=-torch.inf)
    first = padded.view(num_rows, -1, GROUP_SIZE).amax(dim=-1).clamp(min=torch.finfo(padded.dtype).min)
    ahead = (group_sums(weights) / exponential(group_keys, groups)).log() - first
    arrives = arrives + ahead.repeat_interleave(GROUP_SIZE, dim=1)[:, :vocab_size]
    return torch.where(greedy, logits.float(), arrives).log_softmax(dim=-1)


def sample_with_q(
    logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling, implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [N] int64, and the logits of q [N, vocab_size], with -inf where a limit cuts. Verification must
    use other seeds.

    >>> seeds, top_k = torch.tensor([7]), torch.tensor([1])
    >>> sample_with_q(torch.tensor([[0.0, 9.0]]), torch.tensor([5]), Sampling(torch.ones(1), seeds, top_k))
    (tensor([1]), tensor([[-inf, 9.]]))
    """
    q_logits, sampled = cut(logits, positions, sampling, implementation)
    if sampled is None:
        sampled = coupled_sample(q_logits, positions, Sampling(sampling.temperature, sampling.seeds), implementation)
    return sampled, q_logits


def cut(
    logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling, implementation: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the logits with -inf where a limit cuts, and the tokens if the same kernel has drawn them."""
    if sampling.truncates and implementation_of(logits, implementation, "host") == "fused":
        from . import fused

        sampled, *_, limit = fused.rejection_sample(logits, _layout(positions), sampling, 0)
        return logits.masked_fill(logits < limit, -torch.inf), sampled[:, 0]
    return truncated(logits, sampling), None


def _layout(positions: torch.Tensor) -> Layout:
    """Returns rows without drafts, in the types of a step; a request's first token is ignored, so any will do."""
    rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return Layout(rows, rows[:-1], positions, rows[:-1].long())
