"""Prompt lookup for a batch of tensors on a CPU, by the host's version."""

from typing import Any

import numpy as np
import torch

from . import Match, References, Texts, host


def history_match(
    texts: Texts,
    slots: torch.Tensor,  # [R]; rows with limit 0 may have any slot
    limits: torch.Tensor,  # [R]
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None,
    longest: int | None,
) -> Match:
    rows, token_ids = slots.long().numpy(), texts.token_ids
    known = np.zeros((len(texts.distances), host.NUM_COLUMNS), np.int64)
    known[:, : host.REFERENCE] = texts.distances.numpy()
    if references is not None:
        known[:, host.REFERENCE] = references.token_ids.data_ptr() + 4 * references.starts.numpy()
        known[:, host.NUM_TOKENS] = references.lengths.numpy()
    places = token_ids.data_ptr() + 4 * token_ids.stride(0) * rows, texts.lengths[slots].long().numpy(), rows
    drafts: Any = np.zeros((len(rows), max_num_draft), np.int32), np.zeros(len(rows), np.int64), np.zeros(len(rows))
    begun = np.zeros((len(rows), 0), np.int32), np.zeros(0, np.int64)
    host.history_match(*places, known, *begun, limits.long().numpy(), min_ngram, max_ngram, *drafts)
    texts.distances.copy_(torch.from_numpy(known[:, : host.REFERENCE]))
    token_ids, num_draft, match_lengths = (torch.from_numpy(array).int() for array in drafts)
    return token_ids, num_draft, match_lengths
