"""Edits of logits in PyTorch. R: num_reqs, K: the most drafts of a request, V: vocab_size, N: num_logits."""

import torch

from . import Edits


def adjust(
    logits: torch.Tensor,  # [N, V]
    cu_num_logits: torch.Tensor,  # [R + 1]
    draft_token_ids: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N]
    idx_mapping: torch.Tensor,  # [R]
    edits: Edits,
) -> torch.Tensor:
    """See the front door."""
    result = logits.to(torch.float32, copy=True)
    num_rows = cu_num_logits.diff().long()
    states = idx_mapping.long().repeat_interleave(num_rows)
    steps = torch.arange(len(states), device=states.device) - cu_num_logits[:-1].long().repeat_interleave(num_rows)
    if edits.allowed_mask is not None:
        result.masked_fill_(~edits.allowed_mask[states], -torch.inf)
    if edits.bitmask is not None:
        result.masked_fill_(~unpack(edits.bitmask, logits.shape[-1]), -torch.inf)
    if edits.bias is not None:
        rows, entries = _pairs(states, edits.bias[0])
        result.index_put_((rows, edits.bias[1][entries].long()), edits.bias[2][entries].float(), accumulate=True)
    if edits.stop_tokens is not None:
        rows, entries = _pairs(states, edits.stop_tokens[0])
        early = positions[rows] < edits.min_positions[states[rows]]
        result[rows[early], edits.stop_tokens[1][entries[early]].long()] = -torch.inf
    if edits.bad_words is not None:
        rows, entries = _pairs(states, edits.bad_words[0])
        words = edits.bad_words[1][entries].long()
        context = _contexts(draft_token_ids, steps, edits.last_token_ids[states])[rows]
        # Words of one token have no prefix to match.
        matches = ((words[:, :-1] == -1) | (words[:, :-1] == context)).all(-1)
        result[rows[matches], words[matches, -1]] = -torch.inf
    if edits.penalizes:
        _penalize(result, draft_token_ids, steps, states, edits)
    return result


def unpack(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N, V] bool of a bitmask [N, ceil(V / 32)] int32."""
    bits = bitmask[..., None] >> torch.arange(32, device=bitmask.device, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _pairs(states: torch.Tensor, entry_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and entries that belong to the same state, as two index tensors."""
    rows, entries = (states[:, None] == entry_states.long()).nonzero(as_tuple=True)
    return rows, entries


def _contexts(draft_token_ids: torch.Tensor, steps: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
    """The tokens before each row's prediction [N, length]: emitted ones, then the step's drafts."""
    length = last_token_ids.shape[-1]
    back = torch.arange(length - 1, -1, -1, device=steps.device)
    # The row's own draft is the last token of its context, if it is not a request's first row.
    in_drafts = back < steps[:, None]
    drafts = draft_token_ids.long()[(torch.arange(len(steps), device=steps.device)[:, None] - back).clamp_(min=0)]
    emitted = last_token_ids.long().gather(1, (length - 1 - (back - steps[:, None])).clamp_(0, length - 1))
    return torch.where(in_drafts, drafts, emitted)


def _penalize(
    logits: torch.Tensor,  # [N, V] float32, edited in place
    draft_token_ids: torch.Tensor,
    steps: torch.Tensor,
    states: torch.Tensor,
    edits: Edits,
) -> None:
    counts = edits.output_counts[states].float()
    rows = torch.arange(len(steps), device=steps.device)
    for back in range(int(steps.max()) if len(steps) else 0):
        earlier = rows[(steps > back)]
        token = draft_token_ids.long()[earlier - back]
        known = token >= 0
        counts.index_put_((earlier[known], token[known]), torch.ones_like(counts[0, 0]), accumulate=True)
    emitted = counts > 0
    if edits.repetition_penalty is not None:
        repeated = emitted if edits.prompt_mask is None else emitted | edits.prompt_mask[states]
        penalty = torch.where(repeated, edits.repetition_penalty[states][:, None], 1.0)
        logits.copy_(torch.where(logits > 0, logits / penalty, logits * penalty))
    if edits.frequency_penalty is not None:
        logits -= edits.frequency_penalty[states][:, None] * counts
    if edits.presence_penalty is not None:
        logits -= edits.presence_penalty[states][:, None] * emitted
