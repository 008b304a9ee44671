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
from .noise import GROUP, TOKEN, exponential, keys
from .reference import GROUP_SIZE, group_sums, truncated


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


def largest_probs_of(
    logits: torch.Tensor,  # [N, vocab_size]
    temperature: torch.Tensor,  # [N], 0 counts as 1
) -> torch.Tensor:
    """[N] float32: the largest probability of each row, before anything is cut.

    >>> largest_probs_of(torch.tensor([[0.75, 0.25]]).log(), torch.zeros(1))
    tensor([0.7500])
    """
    logits = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp_()


def rated_sample(
    logits: torch.Tensor,  # [N, vocab_size], as of coupled_sample
    positions: torch.Tensor,
    sampling: Sampling,
    greedy: bool = False,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `coupled_sample` draws, or if `greedy` the likeliest tokens; and `largest_probs_of` the rows, which a kernel
    finds on its way.

    Args:
        implementation: as of `rejection_sample`.

    >>> logits, own = torch.tensor([[0.75, 0.25]]).log(), Sampling(torch.zeros(1), torch.tensor([7]))
    >>> rated_sample(logits, torch.tensor([5]), own)
    (tensor([0]), tensor([0.7500]))
    """
    if implementation_of(logits, implementation, "host") == "fused":
        from . import fused

        return fused.rated_sample(logits, _layout(positions), sampling, greedy)
    sampled = logits.argmax(dim=-1) if greedy else coupled_sample(logits, positions, sampling, implementation)
    return sampled, largest_probs_of(logits, sampling.temperature)


def race_logprobs(
    logits: torch.Tensor,  # [N, vocab_size] floating
    positions: torch.Tensor,  # [N] int64: where the token that is drawn will stand
    sampling: Sampling,  # of the rows, [N] each
    implementation: str | None = None,
) -> torch.Tensor:
    """Logarithms [N, vocab_size] of how likely each token is to win the race of `coupled_sample` with logits that are
    nearly these: softmax of how far each is behind its winner. At temperature 0 it is that of the logits.

    On a GPU nothing waits for it.

    Args:
        implementation: as of `rejection_sample`.

    >>> race_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([5]), Sampling(torch.zeros(1), torch.tensor([7]))).exp()
    tensor([[0.2689, 0.7311]])
    """
    (num_rows, vocab_size), greedy = logits.shape, (sampling.temperature == 0)[:, None]
    kept = _cut(logits, positions, sampling, implementation)[0].float().nan_to_num(-torch.inf, neginf=-torch.inf)
    behind = kept - kept.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).min)
    weights = (behind / sampling.temperature.masked_fill(greedy[:, 0], 1.0)[:, None]).exp()
    group_keys, token_keys = (keys(sampling.seeds, positions, stream)[:, None] for stream in (GROUP, TOKEN))
    tokens, groups = (torch.arange(size, device=logits.device) for size in (vocab_size, -(-vocab_size // GROUP_SIZE)))
    arrives = (weights / exponential(token_keys, tokens)).log()
    padded = torch.nn.functional.pad(arrives, (0, len(groups) * GROUP_SIZE - vocab_size), value=-torch.inf)
    first = padded.view(num_rows, -1, GROUP_SIZE).amax(dim=-1).clamp(min=torch.finfo(padded.dtype).min)
    ahead = (group_sums(weights) / exponential(group_keys, groups)).log() - first
    arrives = arrives + ahead.repeat_interleave(GROUP_SIZE, dim=1)[:, :vocab_size]
    return torch.where(greedy, logits.float(), arrives).log_softmax(dim=-1)


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
    kept, sampled = _cut(logits, positions, sampling, implementation)
    if sampled is None:
        whole = Sampling(sampling.temperature, sampling.seeds)
        sampled = coupled_sample(kept, positions, whole, implementation)
    return sampled, kept


def _cut(
    logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling, implementation: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits, -inf where a limit cuts; and what is drawn from them, where a kernel has found it on its way."""
    if sampling.truncates and implementation_of(logits, implementation, "host") == "fused":
        from . import fused

        sampled, *_, limit = fused.rejection_sample(logits, _layout(positions), sampling, 0)
        return logits.masked_fill(logits < limit, -torch.inf), sampled[:, 0]
    return truncated(logits, sampling), None


def _layout(positions: torch.Tensor) -> Layout:
    """A request's first row has no draft, so any token will do; the types are those of a step without drafts."""
    rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return Layout(rows, rows[:-1], positions, rows[:-1].long())
