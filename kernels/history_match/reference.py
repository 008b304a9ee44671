"""Prompt lookup for a batch in PyTorch: compares each text with its ending, once for each token of a match. It never
waits for the device, so it searches each text's whole row. R: rows, L: room of a text, N: LONGEST_MATCH."""

import torch

from . import LONGEST_MATCH, Match, References, Texts


def history_match(
    texts: Texts,
    slots: torch.Tensor,  # [R]
    limits: torch.Tensor,  # [R]
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None,
    longest: int | None,
) -> Match:
    slots, steps = slots.long(), torch.arange(max_num_draft, device=slots.device)
    text = texts.token_ids[slots, :longest].long()
    end = texts.lengths[slots].long().clamp(max=text.shape[1])  # a chunked prompt has no room for drafts
    last = end[:, None] - 1 - torch.arange(LONGEST_MATCH, device=slots.device)
    ending = text.gather(1, last.clamp(min=0)).masked_fill(last < 0, -1)
    expected = (end[:, None] - texts.distances[slots]).clamp(min=0)
    place, match_length = _nearest_match(text, end, ending, min_ngram, max_ngram, expected[:, 0])
    _write(texts.distances[:, 0], slots, end - place, (limits > 0) & (match_length > 0))
    # The copy may overlap itself, as in LZ77.
    token_ids = text.gather(1, place[:, None] + steps % (end - place).clamp(min=1)[:, None])
    num_draft = torch.where(match_length > 0, limits, 0)
    if references is not None:
        places = references.starts[slots, None] + torch.arange(text.shape[1], device=slots.device)
        other = references.token_ids[places.clamp(max=len(references.token_ids) - 1)].long()
        size = references.lengths[slots].long()
        place, length = _nearest_match(other, size, ending, min_ngram, max_ngram, expected[:, 1])
        _write(texts.distances[:, 1], slots, end - place, (limits > 0) & (length > 0))
        is_better = length > match_length
        followed = other.gather(1, (place[:, None] + steps).clamp(max=text.shape[1] - 1))
        token_ids = torch.where(is_better[:, None], followed, token_ids)
        num_draft = torch.where(is_better, torch.minimum(limits, size - place), num_draft)
        match_length = torch.maximum(match_length, length)
    token_ids = torch.where(steps < num_draft[:, None], token_ids, 0)
    return token_ids.int(), num_draft.int(), torch.where(limits > 0, match_length, 0).int()


def _nearest_match(
    text: torch.Tensor,  # [R, L]
    size: torch.Tensor,  # [R]
    ending: torch.Tensor,  # [R, N], the last token first, -1 before the beginning
    min_ngram: int,
    max_ngram: int,
    expected: torch.Tensor,  # [R]
) -> tuple[torch.Tensor, torch.Tensor]:
    last = torch.arange(text.shape[1], device=text.device)
    is_match = last < size[:, None] - 1
    length = torch.zeros_like(text)
    for n in range(ending.shape[1]):
        earlier = text.roll(n, dims=1)
        is_match = is_match & (earlier == ending[:, n, None]) & (last >= n)
        length += is_match
    away = last + 1 - expected[:, None]
    length = torch.where((length >= min_ngram) | (away == 0), length, 0)
    score = (length.clamp(max=max_ngram) << 33) - 2 * away.abs() - (away > 0).long()
    place = torch.where(length > 0, score, torch.iinfo(torch.int64).min).argmax(1, keepdim=True)
    length = length.gather(1, place)[:, 0]
    return torch.where(length > 0, place[:, 0] + 1, 0), length


def _write(
    distances: torch.Tensor,  # [S]
    slots: torch.Tensor,  # [R]; padding may have any slot
    newest: torch.Tensor,  # [R]
    is_match: torch.Tensor,  # [R] bool
) -> None:
    more = torch.cat((distances, distances[:1]))
    more[torch.where(is_match, slots, len(distances))] = newest.int()
    distances.copy_(more[:-1])
