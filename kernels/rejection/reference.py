"""Modified rejection sampling in PyTorch: reads like the paper, and runs on a CPU.

A draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)); otherwise a token is recovered from the
normalised residual max(p - q, 0). After the last accepted draft a bonus token is drawn from p. All are then distributed
as p.

With a one-hot q this is one draw: draw x ~ p, accept d if x = d, and emit x otherwise. It accepts with probability p(d)
= min(1, p(d) / 1). After a rejection, x is distributed as p without d, normalised: the residual. In both cases x is
emitted, so only the noise decides the emitted tokens, and the draft decides only their number in a step.

A draw is a race in two heats. If token v arrives after E_v / w_v, E_v ~ Exponential(1), it arrives first with
probability w_v / sum(w) (the Gumbel-max trick, exponentiated). The first token of a group, of any identity, arrives
after Exponential(1) / (sum of the group's w). So the groups race first, each with one random number, and then the
tokens of the winning group. This takes V / G + G random numbers instead of V. N: rows, B: requests, K: max_num_draft,
V: vocab_size, G: GROUP_SIZE.
"""

import math
from collections.abc import Callable, Iterator

import torch

from . import Layout, Sampling
from .noise import ACCEPT, GROUP, RECOVERED_GROUP, RECOVERED_TOKEN, TOKEN, exponential, keys, uniform
from .truncation import thresholds

GROUP_SIZE = 256
# Rows are taken in chunks that stay in the cache.
_CHUNK_ELEMENTS = 1 << 20


def draft_ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns p / q of drafts, from their probabilities p under the target and q under the proposer: finite, and 0 if p
    is 0."""
    return torch.where(p > 0, p / q, 0.0).clamp_(max=torch.finfo(p.dtype).max)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns the weights [..., V] of the token after a rejected draft: max(p - q, 0), or p if rounding makes all of
    these 0."""
    return (p - q).clamp_(min=0).add_(p, alpha=2.0**-80)


def finite_with_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns floating-point logits [N, V], with NaN as -inf and +inf as the largest float32, and the rows' maxima [N,
    1], which are the lowest finite number for rows of -inf alone."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    maximum = logits.amax(dim=-1, keepdim=True)
    if not math.isfinite(maximum.sum()):  # rare
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
        maximum = logits.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return logits, maximum


def weigh(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns finite logits and their weights [N, V], exp2(scale [N] * (logit - row maximum))."""
    logits, maximum = finite_with_max(logits)
    return logits, (logits - maximum).mul_(scale[:, None]).exp2_()


def _weighed(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns finite logits and their weights [N, V] before truncation, and the limits' thresholds [N], if any."""
    temperature = sampling.temperature.to(torch.promote_types(logits.dtype, torch.float32))
    scale = torch.where(temperature == 0, 1.0, temperature).reciprocal_().mul_(math.log2(math.e))
    logits, weights = weigh(logits, scale)
    limits = sampling.top_k, sampling.top_p, sampling.min_p
    return logits, weights, thresholds(logits, scale, weights, *limits) if sampling.truncates else None


def weights(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns weights [N, V] of the tokens under the rows' sampling parameters: probabilities, scaled so that the
    largest is 1. At temperature 0 all others are 0. The dtype is float32, or float64 for float64 logits."""
    logits, result, limit = _weighed(logits, sampling)
    if limit is not None:
        result.masked_fill_(logits < limit[:, None], 0)
    greedy = sampling.temperature == 0
    if greedy.any():
        result[greedy] = torch.zeros_like(result[greedy]).scatter_(1, logits[greedy].argmax(-1, keepdim=True), 1)
    return result


def truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns logits [N, V] with -inf where a row's limits cut. NaN stays, and temperature 0 counts as 1."""
    limit = _weighed(logits, sampling)[2] if sampling.truncates else None
    return logits if limit is None else logits.masked_fill(logits < limit[:, None], -torch.inf)


def probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns probabilities [N, V] under the rows' sampling parameters; one-hot at temperature 0, and 0 for a row of
    -inf alone."""
    result = weights(logits, sampling)
    return result.div_(result.sum(-1, keepdim=True).clamp_(min=1))


def group_sums(weights: torch.Tensor, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """Returns weights [N, ceil(V / G)] of the groups, from the tokens' [N, V]."""
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
    """Draws token ids [N] int64 in proportion to the weights; token 0 if all of a row's are 0."""
    vocab_size, device = weights.shape[-1], weights.device
    sums = group_sums(weights)
    group_keys, token_keys = (keys(seeds, positions, stream)[:, None] for stream in streams)
    noise = exponential(group_keys, torch.arange(sums.shape[-1], device=device))
    first = (sums / noise).argmax(-1, keepdim=True) * GROUP_SIZE
    token_ids = first + torch.arange(min(GROUP_SIZE, vocab_size), device=device)
    group = weights.gather(1, token_ids.clamp(max=vocab_size - 1)).masked_fill_(token_ids >= vocab_size, 0)
    return first[:, 0] + (group / exponential(token_keys, token_ids)).argmax(-1)


def draw_rows(logits: torch.Tensor, positions: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draws token ids [N] int64 from each row [N, V] under its sampling parameters."""
    parts = [(part, sampling.at(part)) for part in chunks(*logits.shape)]
    drawn = [draw(weights(logits[part], chosen), chosen.seeds, positions[part]) for part, chosen in parts]
    return torch.cat(drawn) if drawn else positions[:0]


def draft_probs(draft_logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> torch.Tensor:
    """Returns q [N, vocab_size] of draft logits [N, <= vocab_size]. It is 0 at temperature 0, where p alone decides,
    and if the logits form no distribution."""
    q = probs(draft_logits, Sampling(sampling.temperature, sampling.seeds))
    decides = is_distribution(draft_logits) & (sampling.temperature != 0)
    return torch.nn.functional.pad(q.masked_fill_(~decides[:, None], 0), (0, vocab_size - q.shape[-1]))


def is_distribution(draft_logits: torch.Tensor) -> torch.Tensor:
    """Returns [...] bool: whether draft logits [..., V] form a distribution, which excludes NaN, +inf, and rows of -inf
    alone."""
    return draft_logits.amax(dim=-1).isfinite()


def chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return (slice(begin, begin + size) for begin in range(0, num_rows, size))


def _verify(
    target_logits: torch.Tensor,  # [B, K + 1, V]
    draft_logits: torch.Tensor,  # [B, K, <= V]
    drafts: torch.Tensor,  # [B, K]
    num_draft: torch.Tensor,  # [B]
    positions: torch.Tensor,  # [B, K + 1]
    sampling: Sampling,  # of the requests
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of accepted drafts, and the token after them, [B] int64 each."""
    num_reqs, width, vocab_size = target_logits.shape
    every, steps = (torch.arange(size, device=drafts.device) for size in (num_reqs, width))
    p = probs(target_logits.flatten(0, 1), sampling.at(every.repeat_interleave(width))).view(num_reqs, width, -1)
    q_sampling = sampling.at(every.repeat_interleave(width - 1))
    q = draft_probs(draft_logits.flatten(0, 1), q_sampling, vocab_size).view(num_reqs, width - 1, -1)
    q.masked_fill_((steps[:-1] >= num_draft[:, None])[..., None], 0)
    known = (drafts >= 0) & (drafts < vocab_size)
    known &= is_distribution(draft_logits) | (sampling.temperature == 0)[:, None]
    token = drafts.clamp(0, vocab_size - 1)[..., None]
    ratio = draft_ratio(p[:, :-1].gather(2, token)[..., 0], q.gather(2, token)[..., 0]).where(known, 0.0)
    numbers = uniform(keys(sampling.seeds[:, None], positions[:, :-1], ACCEPT), torch.zeros_like(drafts))
    num_accepted = (numbers < ratio).cumprod(1).sum(1)
    is_bonus = num_accepted == num_draft
    last_q = torch.where(is_bonus[:, None], 0.0, q[every, num_accepted.clamp(max=width - 2)])
    left = residual(p[every, num_accepted], last_q)
    streams = torch.where(is_bonus, GROUP, RECOVERED_GROUP), torch.where(is_bonus, TOKEN, RECOVERED_TOKEN)
    return num_accepted, draw(left, sampling.seeds, positions[every, num_accepted], streams)


def rejection_sample(
    target_logits: torch.Tensor,
    layout: Layout,
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_num_logits, draft_token_ids, positions, idx_mapping, *_ = layout
    num_rows, states = cu_num_logits.diff().long(), idx_mapping.long()
    steps = torch.arange(max_num_draft + 1, device=num_rows.device)
    # The row of each step; after a request's last row any row.
    rows = (cu_num_logits[:-1, None] + steps).clamp_(max=len(target_logits) - 1)
    drafts = torch.where(steps[1:] < num_rows[:, None], draft_token_ids.long()[rows[:, 1:]], -1)
    if draft_logits is None or max_num_draft == 0:
        tokens = draw_rows(target_logits, positions, sampling.at(states.repeat_interleave(num_rows)))[rows]
        num_accepted = (tokens[:, :-1] == drafts).cumprod(1).sum(1)
    else:
        tokens, num_accepted = torch.nn.functional.pad(drafts, (0, 1)), torch.zeros_like(num_rows)
        for part in chunks(len(states), target_logits.shape[-1] * len(steps)):
            arguments = drafts[part], num_rows[part] - 1, positions[rows[part]], sampling.at(states[part])
            q_logits = draft_logits[states[part], :max_num_draft]
            num_accepted[part], last = _verify(target_logits[rows[part]], q_logits, *arguments)
            tokens[part].scatter_(1, num_accepted[part, None], last[:, None])
    num_sampled = torch.where(num_rows > 0, num_accepted + 1, 0).int()
    return torch.where(steps < num_sampled[:, None], tokens, -1), num_sampled


def sample_step(
    target_logits: torch.Tensor,
    layout: Layout,
    sampling: Sampling,
    max_num_draft: int,
    sample: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gathers the drafts, samples, and counts the rejected drafts."""
    starts, fed_at = layout.cu_num_logits.long(), layout.positions[layout.logits_indices]
    prefill_len = layout.prefill_len[layout.idx_mapping.long()]
    num_rows, rows = starts.diff(), torch.arange(len(fed_at), device=fed_at.device)
    first = starts[:-1].repeat_interleave(num_rows, output_size=len(fed_at))
    is_placeholder = (rows > first) & (fed_at[first] < prefill_len.repeat_interleave(num_rows, output_size=len(fed_at)))
    drafts = layout.draft_token_ids[layout.logits_indices].long().masked_fill(is_placeholder, -1)
    given = target_logits, layout.cu_num_logits, drafts, fed_at + 1, layout.idx_mapping, sampling, max_num_draft
    sampled, num_sampled = sample(*given)
    goes_on = layout.seq_lens[: len(prefill_len)] < prefill_len
    num_rejected = (num_rows.int() - num_sampled).masked_fill(goes_on, 0)
    return sampled.masked_fill(goes_on[:, None], -1), num_sampled.masked_fill(goes_on, 0), num_rejected
