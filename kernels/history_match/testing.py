"""Inputs for whoever checks prompt lookup: texts over several tiles that end as they went on somewhere."""

from typing import Any, NamedTuple

import torch

from . import NO_MATCH, References, Texts

_LONGEST, _SHORTEST, _VOCAB_SIZE = 2_600, 1_100, 40


class Lookup(NamedTuple):
    """The arguments of `history_match`."""

    texts: Texts
    slots: Any
    max_draft: Any
    max_num_draft: int
    min_ngram: int
    max_ngram: int
    references: References


def make_lookup(max_num_draft: int, num_reqs: int = 12, seed: int = 1) -> Lookup:
    """A third of the requests finds its own text, a third its reference, a third by chance; one row wants nothing."""
    rng = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    texts, others = (numbers(0, _VOCAB_SIZE, num_reqs, _LONGEST + 8) for _ in range(2))
    lengths, sizes = (numbers(_SHORTEST, _LONGEST + 1, num_reqs) for _ in range(2))
    for slot, length in enumerate(lengths.tolist()):
        found, where = (texts, others)[slot % 2], int(numbers(20, _SHORTEST, 1))
        if slot % 3:
            texts[slot, length - 20 : length] = found[slot, where - 20 : where].clone()
    max_draft = torch.full((num_reqs,), max_num_draft, dtype=torch.int32)
    max_draft[-1] = 0
    pool = References(others.flatten(), torch.arange(num_reqs) * (_LONGEST + 8), sizes)
    distances = numbers(1, _SHORTEST, num_reqs, 2)
    distances[::4] = NO_MATCH
    return Lookup(
        Texts(texts, lengths, distances), torch.randperm(num_reqs, generator=rng), max_draft, max_num_draft, 2, 8, pool
    )
