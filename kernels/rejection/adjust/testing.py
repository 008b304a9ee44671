"""Edits of every kind at once, for the tests of `adjust` and the check of a device."""

import torch

from ..testing import Batch
from . import Allowed, BadWords, Bias, Edits, MinTokens, Penalties


def make_edits(batch: Batch, *, seed: int = 0) -> Edits:
    """Lists from empty to several blocks of entries, which share tokens; every fourth state asks for nothing.

    Prompts end, and stop tokens may come, near the first row. Histories, and words but for their last token, are of so
    few tokens that they match. What stands after a list, and in a history beyond the prompt and the output, is tokens
    that must not count. 16 divides the rows' lengths, as those of Model Runner V2.
    """
    rng = torch.Generator().manual_seed(seed)
    vocab_size = batch.target_logits.shape[1]
    num_states, num_words, longest = len(batch.sampling.seeds), 24, 4
    asks = torch.arange(num_states) % 4 != 3
    pool = torch.randperm(vocab_size, generator=rng)[:2048].int()

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    def lists(max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and tokens, which differ."""
        size = min(max_length, len(pool))
        places = integers(0, len(pool), num_states, 1) + torch.arange(max_length)
        return integers(0, size + 1, num_states) * asks, pool[places % len(pool)]

    def said(*shape: int) -> torch.Tensor:
        return pool[integers(0, min(3, len(pool)), *shape)]

    lengths = torch.zeros(num_states, dtype=torch.int32)
    lengths[batch.idx_mapping.long()] = batch.positions[batch.cu_num_logits[:-1].long()].int()
    values = torch.randn(3, num_states, generator=rng).masked_fill_(~asks, 0)
    offsets = torch.nn.functional.pad(integers(1, longest + 1, num_states, num_words).cumsum(1).int(), (1, 0))
    words = said(num_states, num_words * longest)
    words.scatter_(1, offsets[:, 1:].long() - 1, pool[integers(0, len(pool), num_states, num_words)])
    num_allowed, allowed = lists(1024)
    return Edits(
        allowed=Allowed(num_allowed * (torch.arange(num_states) % 2).int(), allowed),
        bias=Bias(*(listed := lists(1024)), torch.randn(listed[1].shape, generator=rng)),
        min_tokens=MinTokens(*lists(16), lengths + integers(-1, 4, num_states)),
        penalties=Penalties(
            (values[0] * 0.3).exp(),
            values[1].clone(),  # aligned, as an array of its own is
            values[2].clone(),
            integers(-(2**31), 2**31 - 1, num_states, (vocab_size + 31) // 32),
            integers(0, 3, num_states, vocab_size),
        ),
        bad_words=BadWords(
            integers(0, num_words + 1, num_states) * asks,
            offsets,
            words,
            said(num_states, (int(lengths.max()) // 16 + 1) * 16),
            (lengths - integers(0, 3, num_states)).clamp(min=0),
        ),
    )
