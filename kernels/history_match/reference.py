"""Prompt lookup of a batch, in PyTorch. Each text is compared with its own ending, once for each token of an n-gram.

Reads nothing on the host: all texts are looked through up to their room's end. R: rows, L: room of a text, N: longest
n-gram, K: most tokens of a draft.
"""

import torch

from . import Begun, Match, References, Texts


def history_match(
    texts: Texts,
    slots: torch.Tensor,  # [R]
    wanted: torch.Tensor,  # [R]
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None,
    begun: Begun | None,
    longest: int | None,
) -> Match:
    """See the front door."""
    slots = slots.long()
    own, size = texts.token_ids[slots, :longest].long(), texts.lengths[slots].long()
    end = size if begun is None else size + begun.num_tokens
    last = end[:, None] - 1 - torch.arange(max_ngram, device=slots.device)
    ending = torch.where(last < 0, -1, _tokens(own, size, begun, last))
    place, match_length = _longest_match(own, size, ending, min_ngram)
    steps = torch.arange(max_num_draft, device=slots.device)
    period = (end - 1 - place).clamp(min=1)
    token_ids = _tokens(own, size, begun, place[:, None] + 1 + steps % period[:, None])
    num_draft = torch.where(match_length > 0, wanted, 0)
    if references is not None:
        places = references.starts[slots, None] + torch.arange(own.shape[1], device=slots.device)
        other = references.token_ids[places.clamp(max=len(references.token_ids) - 1)].long()
        size = references.lengths[slots].long()
        there, length = _longest_match(other, size, ending, min_ngram)
        is_better = length > match_length
        followed = other.gather(1, (there[:, None] + 1 + steps).clamp(max=own.shape[1] - 1))
        token_ids = torch.where(is_better[:, None], followed, token_ids)
        num_draft = torch.where(is_better, torch.minimum(wanted, size - 1 - there), num_draft)
        match_length = torch.maximum(match_length, length)
    token_ids = torch.where(steps < num_draft[:, None], token_ids, 0)
    return Match(token_ids.int(), num_draft.int(), torch.where(wanted > 0, match_length, 0).int())


def _tokens(
    own: torch.Tensor,  # [R, L]
    size: torch.Tensor,  # [R]
    begun: Begun | None,
    places: torch.Tensor,  # [R, any], counted through the text and the draft behind it
) -> torch.Tensor:
    tokens = own.gather(1, places.clamp(0, own.shape[1] - 1))
    if begun is None:
        return tokens
    behind = places - size[:, None]
    following = begun.token_ids.long().gather(1, behind.clamp(0, begun.token_ids.shape[1] - 1))
    return torch.where(behind < 0, tokens, following)


def _longest_match(
    text: torch.Tensor,  # [R, L]
    size: torch.Tensor,  # [R]
    ending: torch.Tensor,  # [R, N], the last token first, -1 before the beginning
    min_ngram: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latest end of the longest match, and its length, 0 without one: [R] each. A token follows every match."""
    places = torch.arange(text.shape[1], device=text.device)
    is_match = places < size[:, None] - 1
    length = torch.zeros_like(text)
    for n in range(ending.shape[1]):
        earlier = text.roll(n, dims=1)
        is_match = is_match & (earlier == ending[:, n, None]) & (places >= n)
        length += is_match
    score = torch.where(length >= min_ngram, length * text.shape[1] + places, -1).max(dim=1).values
    length = torch.where(score < 0, 0, score // text.shape[1])
    return torch.where(score < 0, 0, score % text.shape[1]), length
