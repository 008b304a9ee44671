"""Modified rejection sampling in PyTorch: reads like the paper, and is what runs on a CPU.

A draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)); else a token is recovered from the residual
max(p - q, 0), normalised. After the last accepted draft a bonus token is drawn from p. All are then distributed as p.

With a one-hot q this is one draw: let x ~ p, accept if x = d, else emit x. It accepts with probability p(d) = min(1,
p(d) / 1), and given that it does not, x is distributed as p without d, normalised: the residual. Either way x is
emitted: the noise alone decides what is said, and the draft only how many tokens a step has.

A draw is a race in two heats. If token v arrives after E_v / w_v, E_v ~ Exponential(1), it is the first of all with
probability w_v / sum(w) (the Gumbel-max trick, exponentiated). Of a group of tokens, the first arrives after
Exponential(1) / sum of the group's w, whichever it is: so first a group wins with its own noise, then a token of
that group. It costs V / GROUP_SIZE + GROUP_SIZE random numbers, not V. N: rows, V: vocab_size, G: GROUP_SIZE.
"""

import math
from collections.abc import Callable, Iterator

import torch

from . import Sampling
from .noise.reference import ACCEPT, GROUP, RECOVERED_GROUP, RECOVERED_TOKEN, TOKEN, exponential, keys, uniform
from .truncation.reference import thresholds

GROUP_SIZE = 256
# Rows are taken in chunks that stay in the cache.
_CHUNK_ELEMENTS = 1 << 20


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Probability of accepting a draft that has probability p under the target and q under the proposer."""
    return torch.where(p > 0, (p / q).clamp(max=1), 0.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights [..., V] of the recovered token, from probabilities of the same shape; not normalised.

    Where rounding leaves nothing of max(p - q, 0) it is p that is left.
    """
    return (p - q).clamp_(min=0).add_(p, alpha=2.0**-80)


def finite(logits: torch.Tensor) -> torch.Tensor:
    """float32 (or float64) logits without NaN, which count as -inf, and +inf, which counts as the largest float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)


def finite_with_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`finite` of logits [N, V] and the rows' maxima [N, 1], the lowest number for rows of -inf alone."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    maximum = logits.amax(dim=-1, keepdim=True)
    if not math.isfinite(maximum.sum()):  # rare
        logits = finite(logits)
        maximum = logits.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return logits, maximum


def cut(weights: torch.Tensor, logits: torch.Tensor, limit: torch.Tensor) -> None:
    """Sets weights [N, V] to 0 where the logits are below their row's limit [N]."""
    weights.masked_fill_(logits < limit[:, None], 0)


def weights(logits: torch.Tensor, sampling: Sampling, cut: Callable[..., None] = cut) -> torch.Tensor:
    """Weights [N, V] that the rows' sampling parameters give to the tokens; probabilities but for their sum.

    The largest is 1; at temperature 0 the others are 0. float32, or float64 for float64 logits.
    """
    logits, maximum = finite_with_max(logits)
    temperature, all_random = sampling.temperature.to(logits.dtype), bool(sampling.temperature.all())
    scale = (temperature if all_random else torch.where(temperature == 0, 1.0, temperature)).reciprocal()
    scale *= math.log2(math.e)
    result = (logits - maximum).mul_(scale[:, None]).exp2_()
    if sampling.truncates:
        limit = thresholds(logits, scale, result, sampling.top_k, sampling.top_p, sampling.min_p)
        cut(result, logits, limit)
    if not all_random:
        greedy = temperature == 0
        likeliest = logits[greedy].argmax(-1, keepdim=True)
        result[greedy] = torch.zeros_like(result[greedy]).scatter_(1, likeliest, 1)
    return result


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [N, V] with -inf for the tokens that the rows' limits cut; NaN stays. At temperature 0 as at 1."""
    if not sampling.truncates:
        return logits
    known, maximum = finite_with_max(logits)
    temperature = sampling.temperature.to(known.dtype)
    scale = math.log2(math.e) / torch.where(temperature == 0, 1.0, temperature)
    weights = (known - maximum).mul_(scale[:, None]).exp2_()
    limit = thresholds(known, scale, weights, sampling.top_k, sampling.top_p, sampling.min_p)
    return logits.masked_fill(logits < limit[:, None], -torch.inf)


def probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [N, V] under the rows' sampling parameters; one-hot at temperature 0, 0 for a row of -inf alone."""
    result = weights(logits, sampling)
    return result.div_(result.sum(-1, keepdim=True).clamp_(min=1))


def group_sums(weights: torch.Tensor, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """Weights [N, ceil(V / G)] of the groups, from the tokens' [N, V]."""
    num_rows, vocab_size = weights.shape
    whole = vocab_size // group_size * group_size
    sums = weights[:, :whole].view(num_rows, -1, group_size).sum(-1) if whole else weights[:, :0]
    return sums if whole == vocab_size else torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)


def draw(
    weights: torch.Tensor,  # [N, V]
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64
    streams: tuple[int | torch.Tensor, int | torch.Tensor] = (GROUP, TOKEN),  # each one for all rows, or [N]
) -> torch.Tensor:
    """Token ids [N] int64, drawn in proportion to the weights; token 0 if all of a row's are 0."""
    vocab_size, device = weights.shape[-1], weights.device
    sums = group_sums(weights)
    group_keys, token_keys = (keys(seeds, positions, stream)[:, None] for stream in streams)
    noise = exponential(group_keys, torch.arange(sums.shape[-1], device=device))
    first = (sums / noise).argmax(-1, keepdim=True) * GROUP_SIZE
    token_ids = first + torch.arange(min(GROUP_SIZE, vocab_size), device=device)
    group = weights.gather(1, token_ids.clamp(max=vocab_size - 1)).masked_fill_(token_ids >= vocab_size, 0)
    return first[:, 0] + (group / exponential(token_keys, token_ids)).argmax(-1)


def draw_rows(
    logits: torch.Tensor,  # [N, V]
    positions: torch.Tensor,  # [N] int64
    sampling: Sampling,  # of the rows
) -> torch.Tensor:
    """Token ids [N] int64, drawn from each row under its sampling parameters."""
    result = positions.new_empty(len(logits), dtype=torch.int64)
    for chunk in chunks(*logits.shape):
        part = sampling.at(chunk)
        if bool((part.temperature == 0).all()):
            result[chunk] = finite_with_max(logits[chunk])[0].argmax(-1)
        else:
            result[chunk] = draw(weights(logits[chunk], part), part.seeds, positions[chunk])
    return result


def is_distribution(draft_logits: torch.Tensor) -> torch.Tensor:
    """[...] bool: rows of draft logits [..., V] that a token can be drawn from: no NaN, no +inf, not -inf alone."""
    return draft_logits.amax(dim=-1).isfinite()


def draft_weights(draft_logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Weights [N, V] of draft logits [N, V]; 0 where they are no distribution, and at temperature 0: only p decides."""
    result = weights(draft_logits, Sampling(sampling.temperature, sampling.seeds))
    decides = is_distribution(draft_logits) & (sampling.temperature != 0)
    return result if bool(decides.all()) else result.masked_fill_(~decides[:, None], 0)


def draft_probs(draft_logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> torch.Tensor:
    """q [N, vocab_size] of draft logits [N, <= vocab_size]; 0 as `draft_weights`."""
    q = draft_weights(draft_logits, sampling)
    q.div_(q.sum(-1, keepdim=True).clamp_(min=1))
    return torch.nn.functional.pad(q, (0, vocab_size - q.shape[-1])) if q.shape[-1] < vocab_size else q


def token_probs(weights: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Probabilities [N] of one token a row; 0 for an id that is not in the vocabulary."""
    vocab_size = weights.shape[-1]
    chosen = weights.gather(1, token_ids.clamp(0, vocab_size - 1)[:, None])[:, 0]
    known = (token_ids >= 0) & (token_ids < vocab_size)
    return torch.where(known, chosen / weights.sum(-1).clamp_(min=1), 0.0)


def accept_dense(
    target_logits: torch.Tensor,  # [N, V]
    draft_logits: torch.Tensor,  # [N, <= V]
    draft_token_ids: torch.Tensor,  # [N] int64, -1: reject
    positions: torch.Tensor,  # [N] int64
    sampling: Sampling,  # of the rows
) -> torch.Tensor:
    """Which drafts are accepted, [N] bool, each for itself."""
    p = token_probs(weights(target_logits, sampling), draft_token_ids)
    q = token_probs(draft_weights(draft_logits, sampling), draft_token_ids)
    ratio = acceptance(p, q).where(is_distribution(draft_logits) | (sampling.temperature == 0), 0.0)
    return uniform(keys(sampling.seeds, positions, ACCEPT), torch.zeros_like(positions)) < ratio


def draw_last(
    target_logits: torch.Tensor,  # [N, V]
    draft_logits: torch.Tensor,  # [N, <= V]
    is_bonus: torch.Tensor,  # [N] bool: nothing was drafted here
    positions: torch.Tensor,  # [N] int64
    sampling: Sampling,  # of the rows
) -> torch.Tensor:
    """Recovered or bonus tokens [N] int64."""
    p = probs(target_logits, sampling)
    q = draft_probs(draft_logits, sampling, p.shape[-1]).masked_fill_(is_bonus[:, None], 0)
    streams = torch.where(is_bonus, GROUP, RECOVERED_GROUP), torch.where(is_bonus, TOKEN, RECOVERED_TOKEN)
    return draw(residual(p, q), sampling.seeds, positions, streams)


def chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return (slice(begin, begin + size) for begin in range(0, num_rows, size))


def rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, V]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    draft_token_ids: torch.Tensor,  # [num_logits]
    positions: torch.Tensor,  # [num_logits]
    idx_mapping: torch.Tensor,  # [num_reqs]
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor | None = None,  # [num_states, >= max_num_draft, <= V]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the front door."""
    num_rows, states = cu_num_logits.diff().long(), idx_mapping.long()
    steps = torch.arange(max_num_draft + 1, device=num_rows.device)
    # The row of each step; after a request's last row any row.
    rows = (cu_num_logits[:-1, None] + steps).clamp_(max=len(target_logits) - 1)
    is_draft = steps[1:] < num_rows[:, None]
    drafts = torch.where(is_draft, draft_token_ids.long()[rows[:, 1:]], -1)
    if draft_logits is None or max_num_draft == 0:
        tokens = draw_rows(target_logits, positions, sampling.at(states.repeat_interleave(num_rows)))[rows]
        num_accepted = (tokens[:, :-1] == drafts).cumprod(1).sum(1)
    else:
        accepted = torch.zeros_like(is_draft)
        for part in chunks(int(is_draft.sum()), target_logits.shape[-1]):
            r, i = (index[part] for index in is_draft.nonzero(as_tuple=True))
            row, state = rows[r, i], states[r]
            arguments = drafts[r, i], positions[row], sampling.at(state)
            accepted[r, i] = accept_dense(target_logits[row], draft_logits[state, i], *arguments)
        num_accepted = accepted.cumprod(1).sum(1)
        tokens = torch.nn.functional.pad(drafts, (0, 1))
        for part in chunks(len(states), target_logits.shape[-1]):
            i, state = num_accepted[part], states[part]
            row, is_bonus = rows[part].gather(1, i[:, None])[:, 0], i == num_rows[part] - 1
            q_logits = draft_logits[state, i.clamp(max=max_num_draft - 1)]
            last = draw_last(target_logits[row], q_logits, is_bonus, positions[row], sampling.at(state))
            tokens[part].scatter_(1, i[:, None], last[:, None])
    num_sampled = torch.where(num_rows > 0, num_accepted + 1, 0).int()
    return torch.where(steps < num_sampled[:, None], tokens, -1), num_sampled
