"""Edits of every kind at once, for the tests of `adjust`."""

import torch

from ..testing import Batch
from . import Allowed, BadWords, Bias, Edits, MinTokens, Penalties


def make_edits(batch: Batch, *, seed: int = 0) -> Edits:
    """Lists from empty to several blocks of entries, in which little is unlikely; every fourth state asks for nothing.

    Prompts end, and stop tokens may come, near the first row. What stands behind a list, and in a history beyond the
    prompt and the output, is tokens that must not count.
    """
    rng = torch.Generator().manual_seed(seed)
    num_logits, vocab_size = batch.target_logits.shape
    num_states, num_words, longest = len(batch.sampling.seeds), 24, 4
    asks = torch.arange(num_states) % 4 != 3

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    def lists(max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and tokens, which differ."""
        size = min(max_length, vocab_size)
        order = torch.rand(num_states, vocab_size, generator=rng).argsort(1)[:, :size].int()
        return integers(0, size + 1, num_states) * asks, order.contiguous()

    def packed(num_rows: int) -> torch.Tensor:
        return integers(-(2**31), 2**31 - 1, num_rows, (vocab_size + 31) // 32)

    lengths = torch.zeros(num_states, dtype=torch.int32)
    lengths[batch.idx_mapping.long()] = batch.positions[batch.cu_num_logits[:-1].long()].int()
    values = torch.randn(3, num_states, generator=rng).masked_fill_(~asks, 0)
    offsets = torch.nn.functional.pad(integers(1, longest + 1, num_states, num_words).cumsum(1).int(), (1, 0))
    return Edits(
        allowed=Allowed(*lists(vocab_size)),
        bias=Bias(*(listed := lists(600)), torch.randn(listed[1].shape, generator=rng)),
        min_tokens=MinTokens(*lists(9), lengths + integers(-1, 4, num_states)),
        penalties=Penalties(
            (values[0] * 0.3).exp(),
            values[1],
            values[2],
            packed(num_states),
            integers(0, 3, num_states, vocab_size),
        ),
        bad_words=BadWords(
            integers(0, num_words + 1, num_states) * asks,
            offsets,
            integers(0, vocab_size, num_states, num_words * longest),
            integers(0, vocab_size, num_states, int(lengths.max()) + 1),
            (lengths - integers(0, 5, num_states)).clamp(min=0),
        ),
        grammar=packed(num_logits),
    )
