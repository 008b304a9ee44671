"""Inputs that decide at the edges of tiles and groups and within a group, for the check of a device.

Cheap to make, for any vocabulary: rows are pieces of one noise, with a dozen peaks of their own. V: vocab_size, R:
rows, P: peaks of a row.
"""

import torch

from . import Sampling
from .testing import Batch

# Places beside which kernels split a row.
_EDGES = (0, 1, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193)
# What a row has: its weight on one edge, or on all of them, or within one group; or none, so that noise decides alone.
_SURE, _EDGE, _GROUP, _FLAT = range(4)
_GROUP_SIZE = 256
# What a draft's logits have more than the target's: the first is rejected at times, the others are recovered, some of
# them only where the joint ratio of the drafts before is high.
_TILTS = (1.0, -1.5, -0.25)


def make_spiky(
    num_draft: list[int], vocab_size: int, dtype: torch.dtype, dense: bool, seed: int, truncated: bool
) -> Batch:
    """A batch of requests with these numbers of drafts, of the types and strides that Model Runner V2 has.

    A fifth of the states is greedy. A draft with a one-hot q is sure where others follow it: what follows a rejected
    one does not matter.
    """
    rng = torch.Generator().manual_seed(seed)
    num_reqs, width, num_rows = len(num_draft), max(num_draft), torch.tensor(num_draft) + 1
    cu_num_logits = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0))
    num_logits = int(cu_num_logits[-1])
    local = torch.arange(num_logits) - cu_num_logits[:-1].repeat_interleave(num_rows)
    num_left = num_rows.repeat_interleave(num_rows) - 1 - local
    kinds = torch.arange(num_logits) % 4
    if truncated or dense:  # what is sure is neither truncated nor recovered
        kinds = torch.where(kinds == _SURE, _EDGE + torch.arange(num_logits) // 4 % 2, kinds)
    if not dense:
        kinds[num_left > 1] = _SURE
    logits = _noise(num_logits, vocab_size, dtype, rng)
    places, heights = _peaks(kinds, vocab_size, rng)
    heights = torch.where((kinds == _FLAT)[:, None], logits.gather(1, places), heights.to(dtype))
    logits.scatter_(1, places, heights)
    # By groups, so that some have no residual; within one by its tokens.
    tilts = torch.where((kinds == _GROUP)[:, None], places, places // _GROUP_SIZE) % len(_TILTS)
    any_peak = (torch.rand(places.shape, generator=rng) + 0.1 * (tilts == 0)).argmax(1)
    likely = (heights + dense * (tilts == 0)).argmax(1)
    peak = torch.where(torch.rand(num_logits, generator=rng) < 0.5, likely, any_peak)
    states = torch.randperm(2 * num_reqs, generator=rng)[:num_reqs]
    draft_logits = None
    if dense:
        has_draft = num_left > 0
        drafted = _noise(int(has_draft.sum()), vocab_size, dtype, rng)
        tilted = heights + torch.tensor(_TILTS, dtype=dtype)[tilts]
        drafted.scatter_(1, places[has_draft], torch.where((kinds == _SURE)[:, None], heights, tilted)[has_draft])
        draft_logits = torch.full((2 * num_reqs, width, vocab_size), torch.nan, dtype=dtype)
        draft_logits[states.repeat_interleave(num_rows)[has_draft], local[has_draft]] = drafted
    return Batch(
        target_logits=logits,
        cu_num_logits=cu_num_logits.int(),
        draft_token_ids=places.gather(1, peak[:, None])[:, 0].roll(1).int(),  # fed at a row: what the row before drafts
        positions=torch.randint(1000, (num_reqs,), generator=rng).repeat_interleave(num_rows) + local,
        idx_mapping=states,
        sampling=_sampling(2 * num_reqs, truncated, rng),
        max_num_draft=width,
        draft_logits=draft_logits,
    )


def _noise(num_rows: int, vocab_size: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """[R, V]; rows begin where vLLM's heads, which are padded, let them."""
    padded = torch.empty(num_rows, -(-vocab_size // 64) * 64, dtype=dtype)
    noise = torch.randn(vocab_size + 64 * num_rows, generator=rng)
    return padded[:, :vocab_size].copy_(noise.unfold(0, vocab_size, 64)[:num_rows])


def _peaks(kinds: torch.Tensor, vocab_size: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logits, [R, P] each, of rows of these kinds [R]."""
    num_rows = len(kinds)
    edges = torch.tensor(sorted({place for place in _EDGES if place < vocab_size} | {vocab_size - 2, vocab_size - 1}))
    number = (kinds == _SURE).cumsum(0)
    sure = torch.where(number % 3 == 0, vocab_size - 1, edges[-number % len(edges)])
    first = torch.randint(-(-vocab_size // _GROUP_SIZE), (num_rows, 1), generator=rng) * _GROUP_SIZE
    within = torch.rand(num_rows, _GROUP_SIZE, generator=rng).argsort(1)[:, : len(edges)]
    anywhere = torch.randint(vocab_size, (num_rows, len(edges)), generator=rng)
    # In the order of the kinds.
    places = torch.stack(
        [sure[:, None].expand_as(within), edges.expand_as(within), (first + within) % vocab_size, anywhere]
    )
    # Hardly different, so that one token too few or too many is drawn at times; no two are the same in bfloat16.
    ranks = torch.rand(within.shape, generator=rng).argsort(1)
    heights = torch.where((kinds == _SURE)[:, None], 30.0, 14.25 + 0.125 * ranks)
    return places[kinds, torch.arange(num_rows)], heights


def _sampling(num_states: int, truncated: bool, rng: torch.Generator) -> Sampling:
    """Of all states; limits alone and together."""
    temperature = _repeated([0.4, 2.0, 1.0, 0.7, 0.0], num_states)
    seeds = torch.randint(-(2**62), 2**62, (num_states,), generator=rng)
    if not truncated:
        return Sampling(temperature, seeds)
    top_k, top_p = _repeated([0, 2, 0, 1, 9], num_states), _repeated([0.3, 1.0, 0.5, 1.0, 0.3, 1.0], num_states)
    min_p = _repeated([0.0, 0.4, 0.0], num_states)
    order = torch.randperm(num_states, generator=rng)
    return Sampling(temperature, seeds, top_k[order].int(), top_p, min_p)


def _repeated(values: list[float], length: int) -> torch.Tensor:
    return torch.tensor(values).repeat(length)[:length]
