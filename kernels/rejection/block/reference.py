"""Block verification in PyTorch, after algorithm 2 of Sun et al. 2024.

Let the joint ratio be r_0 = 1, r_i = min(1, r_{i-1} p(d_i) / q(d_i)). The first i drafts are kept with probability
h_i = R_i / (R_i + 1 - r_i), where R_i = sum(max(r_i p - q, 0)) over the token that follows them; all K with r_K. The
largest i that is kept counts, and what follows is drawn from max(r_i p - q, 0), or from p after the last draft.
N: requests, K: max_num_draft, V: vocab_size.
"""

import torch

from .. import Sampling
from ..noise.reference import BLOCK, GROUP, RECOVERED_GROUP, RECOVERED_TOKEN, TOKEN, keys, uniform
from ..reference import chunks, draft_probs, draw, is_distribution, probs


def residual(ratio: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights [..., V] of what follows drafts of a joint ratio [...]."""
    return (ratio[..., None] * p - q).clamp_(min=0)


def keep_probs(
    p: torch.Tensor,  # [N, K + 1, V]
    q: torch.Tensor,  # [N, K, V]
    drafts: torch.Tensor,  # [N, K] int64, -1: reject
    num_draft: torch.Tensor,  # [N] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint ratios and probabilities of keeping the first 0..K drafts, [N, K + 1] each; none are always kept."""
    token = drafts.clamp(min=0)[..., None]
    p_draft, q_draft = p[:, :-1].gather(2, token)[..., 0], q.gather(2, token)[..., 0]
    ratio = torch.where((drafts >= 0) & (p_draft > 0), p_draft / q_draft, 0.0)
    joint, kept = [torch.ones_like(ratio[:, 0])], [torch.ones_like(ratio[:, 0])]
    for i in range(1, drafts.shape[1] + 1):
        joint.append((joint[-1] * ratio[:, i - 1]).clamp(max=1))
        is_last = num_draft == i
        # Behind the last draft q is 0, and nothing is left to gain by stopping earlier.
        rest = residual(joint[-1], p[:, i], q[:, min(i, q.shape[1] - 1)]).sum(-1)
        keep = torch.where(is_last, joint[-1], torch.nan_to_num(rest / (rest + 1 - joint[-1])))
        kept.append(torch.where(num_draft < i, 0.0, keep))
    return torch.stack(joint, 1), torch.stack(kept, 1)


def block_rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, V]
    cu_num_logits: torch.Tensor,  # [N + 1]
    draft_token_ids: torch.Tensor,  # [num_logits]
    positions: torch.Tensor,  # [num_logits]
    idx_mapping: torch.Tensor,  # [N]
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: torch.Tensor,  # [num_states, >= max_num_draft, <= V]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the front door."""
    num_rows, states = cu_num_logits.diff().long(), idx_mapping.long()
    steps = torch.arange(max_num_draft + 1, device=num_rows.device)
    rows = (cu_num_logits[:-1, None] + steps).clamp_(max=len(target_logits) - 1)
    drafts = torch.where(steps[1:] < num_rows[:, None], draft_token_ids.long()[rows[:, 1:]], -1)
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    num_accepted = torch.zeros_like(num_rows)
    for part in chunks(len(states), target_logits.shape[-1] * (max_num_draft + 1)):
        arguments = drafts[part], num_rows[part] - 1, positions[rows[part]], sampling.at(states[part])
        q_logits = draft_logits[states[part], :max_num_draft]
        num_accepted[part], last = _verify(target_logits[rows[part]], q_logits, *arguments)
        tokens[part].scatter_(1, num_accepted[part, None], last[:, None])
    num_sampled = torch.where(num_rows > 0, num_accepted + 1, 0).int()
    return torch.where(steps < num_sampled[:, None], tokens, -1), num_sampled


def _verify(
    target_logits: torch.Tensor,  # [N, K + 1, V]
    draft_logits: torch.Tensor,  # [N, K, <= V]
    drafts: torch.Tensor,  # [N, K]
    num_draft: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N, K + 1]
    sampling: Sampling,  # of the requests
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts are accepted, and the token after them, [N] int64 each."""
    num_reqs, width, vocab_size = target_logits.shape
    every = torch.arange(num_reqs, device=drafts.device)
    p = probs(target_logits.flatten(0, 1), sampling.at(every.repeat_interleave(width))).view(num_reqs, width, -1)
    repeats = every.repeat_interleave(width - 1)
    q = draft_probs(draft_logits.flatten(0, 1), sampling.at(repeats), vocab_size).view(num_reqs, width - 1, -1)
    # At temperature 0 a draft is certain.
    certain = torch.zeros_like(q).scatter_(2, drafts.clamp(min=0)[..., None], 1)
    q = torch.where((sampling.temperature == 0)[:, None, None], certain, q)
    q.masked_fill_((torch.arange(width - 1, device=q.device) >= num_draft[:, None])[..., None], 0)
    known = is_distribution(draft_logits) | (sampling.temperature == 0)[:, None]
    joint, keep = keep_probs(p, q, drafts.where(known, -1), num_draft)
    counters = torch.arange(width, device=q.device)
    # Keyed by the step's first position: no other step has it, and no position is looked at twice with one number.
    numbers = uniform(keys(sampling.seeds, positions[:, 0], BLOCK)[:, None], counters)
    num_accepted = torch.where((numbers < keep) | (counters == 0), counters, 0).amax(-1)
    is_bonus = num_accepted == num_draft
    last_q = torch.where(is_bonus[:, None], 0.0, q[every, num_accepted.clamp(max=width - 2)])
    last_p, ratio = p[every, num_accepted], joint[every, num_accepted].masked_fill_(is_bonus, 1)
    weights = residual(ratio, last_p, last_q).add_(last_p, alpha=2.0**-80)
    streams = torch.where(is_bonus, GROUP, RECOVERED_GROUP), torch.where(is_bonus, TOKEN, RECOVERED_TOKEN)
    return num_accepted, draw(weights, sampling.seeds, positions[every, num_accepted], streams)
