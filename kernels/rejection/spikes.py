"""Inputs that decide at the edges of tiles and groups, for the check of a device."""

import torch

from .testing import Batch, make_batch

# Places beside which kernels split a row.
_EDGES = (0, 1, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193)


def make_spiky(
    num_draft: list[int], vocab_size: int, dtype: torch.dtype, dense: bool, seed: int, truncated: bool
) -> Batch:
    """A batch of `make_batch` in three parts; a fifth of the states is greedy.

    In the first a row has its weight on one edge, from the vocabulary's end on, and a draft that says so. In the second
    it has it on a dozen of them. In the last it has little, so that noise, and what narrows the choice, decide alone.
    """
    num_states = 2 * len(num_draft)
    limits = {}
    if truncated:
        limits = {
            "top_k": _repeated([1, 3, 2, 1, 0, 2, 4], num_states).int(),
            "top_p": _repeated([1.0, 0.4, 1.0, 0.6, 1.0], num_states),
            "min_p": _repeated([0.0, 0.0, 0.5], num_states),
        }
    heat = _repeated([0.7, 1.3, 0.0, 1.0, 0.8], num_states)
    batch = make_batch(num_draft, vocab_size, dense=dense, seed=seed, dtype=dtype, temperature=heat, **limits)
    rng = torch.Generator().manual_seed(seed)
    edges = {*_EDGES, vocab_size - 2, vocab_size - 1}
    places = torch.tensor(sorted(place for place in edges if 0 <= place < vocab_size))
    part = (torch.arange(len(num_draft)) * 3 // len(num_draft)).repeat_interleave(batch.cu_num_logits.diff().long())
    (sure,) = (part == 0).nonzero(as_tuple=True)
    batch.target_logits[part == 2] *= 0.25
    height = (part == 1) * 14.0
    batch.target_logits[:, places] += (height[:, None] + torch.randn(len(part), len(places), generator=rng)).to(dtype)
    batch.target_logits[sure, places[-1 - torch.arange(len(sure)) % len(places)]] += 30
    if batch.draft_logits is not None:
        batch.draft_logits[..., places] += (14 + torch.randn(len(places), generator=rng)).to(dtype)
    likely = batch.target_logits.argmax(-1)
    is_likely = (part == 0) | (part == 1) & (torch.rand(likely.shape, generator=rng) < 0.5)
    any_place = places[torch.randint(len(places), likely.shape, generator=rng)]
    others = torch.where(part == 1, any_place, batch.draft_token_ids.roll(-1))
    drafted = torch.where(is_likely, likely, others)
    return batch._replace(draft_token_ids=drafted.roll(1))


def _repeated(values: list[float], length: int) -> torch.Tensor:
    return torch.tensor(values).repeat(length)[:length]
