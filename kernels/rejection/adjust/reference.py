"""Edits of logits in PyTorch, request by request. K: drafts of a request, V: vocab_size, M: tokens of a list."""

from itertools import pairwise

import torch

from .. import Layout
from . import BadWords, Edits, Penalties


def adjust(logits: torch.Tensor, layout: Layout, edits: Edits, max_num_draft: int, only_last: bool) -> torch.Tensor:
    result = logits.to(torch.float32, copy=True)
    bounds = layout.cu_num_logits.tolist()
    for request, state in enumerate(layout.idx_mapping.tolist()):
        rows = slice(bounds[request], bounds[request + 1])
        edited = result[request : request + 1] if only_last else result[rows]
        _adjust_request(edited, layout.draft_token_ids[rows][1:].long(), layout.positions[rows], state, edits)
    return result


def _adjust_request(
    logits: torch.Tensor,  # [K + 1, V] float32, or the last row alone; edited in place
    drafts: torch.Tensor,  # [K] int64, -1 is no token
    positions: torch.Tensor,  # [K + 1]
    state: int,
    edits: Edits,
) -> None:
    if edits.bias is not None:
        token_ids = _listed(edits.bias, state)
        logits[:, token_ids] += edits.bias.values[state, : len(token_ids)]
    if edits.penalties is not None:
        _penalize(logits, drafts, state, edits.penalties)
    if edits.allowed is not None and len(token_ids := _listed(edits.allowed, state)):
        allowed = logits[:, token_ids]
        logits.fill_(-torch.inf)
        logits[:, token_ids] = allowed
    if edits.min_tokens is not None and len(token_ids := _listed(edits.min_tokens, state)):
        early = (positions[len(positions) - len(logits) :] < edits.min_tokens.min_positions[state]).nonzero()
        logits[early, token_ids] = -torch.inf
    if edits.bad_words is not None:
        _forbid_words(logits, drafts, positions, state, edits.bad_words)


def unpack(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpacks bits [..., ceil(V / 32)] int32 to [..., V] bool."""
    bits = words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def _listed(tokens: tuple[torch.Tensor, ...], state: int) -> torch.Tensor:
    """Returns a state's list, [M] int64; the tuple begins with the lists' lengths and tokens."""
    num_tokens, token_ids = tokens[:2]
    return token_ids[state, : int(num_tokens[state])].long()


def _penalize(logits: torch.Tensor, drafts: torch.Tensor, state: int, penalties: Penalties) -> None:
    repetition, frequency, presence = (values[state] for values in penalties[:3])
    if repetition == 1 and frequency == 0 and presence == 0:
        return
    prompt = unpack(penalties.prompt_mask[state], logits.shape[-1])
    is_emitted = penalties.output_counts[state].bool() | prompt
    if len(drafts):
        is_emitted.index_fill_(0, drafts[drafts >= 0], True)
    token_ids = is_emitted.nonzero()[:, 0]
    counts = penalties.output_counts[state].index_select(0, token_ids)
    if len(drafts):  # a row counts the drafts up to the one that is fed at it
        counts = counts + torch.nn.functional.pad(drafts[:, None] == token_ids, (0, 0, 1, 0)).cumsum(0)
        counts = counts[len(counts) - len(logits) :]
    scale = torch.where((counts > 0) | prompt[token_ids], repetition, 1.0)
    columns = logits.index_select(1, token_ids)
    columns *= torch.where(columns > 0, 1 / scale, scale)  # as vLLM's samplers, to the last bit
    columns -= frequency * counts
    columns -= presence * (counts > 0)
    logits.index_copy_(1, token_ids, columns)


def _forbid_words(
    logits: torch.Tensor, drafts: torch.Tensor, positions: torch.Tensor, state: int, bad_words: BadWords
) -> None:
    num_words = int(bad_words.num_words[state])
    if num_words == 0 or len(logits) == 0:
        return
    words = list(pairwise(bad_words.offsets[state, : num_words + 1].tolist()))
    # No word looks further back than the longest.
    end = int(positions[0])
    longest = max(last - first for first, last in words)
    begin = min(max(int(bad_words.prompt_lengths[state]), end - longest), end)
    emitted = bad_words.history[state, begin:end].tolist() + drafts.tolist()
    for first, last in words:
        *prefix, token = bad_words.token_ids[state, first:last].tolist()
        for step, row in enumerate(logits, start=len(positions) - len(logits)):
            length = end - begin + step
            if prefix == emitted[max(length - len(prefix), 0) : length]:
                row[token] = -torch.inf
