"""Inputs for the check of a device: ragged batches that decide at the edges of tiles and groups and within a group.

Cheap to make, for any vocabulary: rows are pieces of one noise, with a dozen peaks of their own. V: vocab_size, R:
rows, P: peaks of a row.
"""

from typing import Any, NamedTuple

import torch

from . import Layout, Sampling

# Places beside which kernels split a row.
_EDGES = (0, 1, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193)
# What a row has: its weight on one edge, or on all of them, or within one group; or none, so that noise decides alone.
_SURE, _EDGE, _GROUP, _FLAT = range(4)
_GROUP_SIZE = 256
# What a draft's logits have more than the target's: the first is rejected at times, the others are recovered, some of
# them only where the joint ratio of the drafts before is high.
_TILTS = (1.0, -1.5, -0.25)


class Batch(NamedTuple):
    """Arguments of `rejection_sample`, in its order."""

    target_logits: torch.Tensor
    cu_num_logits: torch.Tensor
    draft_token_ids: torch.Tensor
    positions: torch.Tensor
    idx_mapping: torch.Tensor
    sampling: Sampling
    max_num_draft: int
    draft_logits: torch.Tensor | None = None


def to_device(value: Any, device: torch.device | str) -> Any:
    """Tensors of a tuple, or of `Sampling`, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Sampling):
        return Sampling(*(to_device(field, device) for field in vars(value).values()))
    if isinstance(value, tuple):
        moved = [to_device(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


def as_step(batch: Batch, prompts: int = 0) -> tuple[torch.Tensor, Layout, Sampling, int]:
    """Arguments of `sample_step` for the same rows, each after one token more of its request.

    Args:
        prompts: so many requests, the last ones, feed tokens of their prompts; every other one's goes on after them.
    """
    num_reqs, num_rows = len(batch.idx_mapping), batch.cu_num_logits.diff()
    requests = torch.arange(num_reqs).repeat_interleave(num_rows.long())
    rows = torch.arange(len(requests))
    places = rows + requests + 1
    tokens, positions = (torch.full((len(rows) + num_reqs,), 7, dtype=dtype) for dtype in (torch.int32, torch.int64))
    tokens[places], positions[places] = batch.draft_token_ids.int(), batch.positions - 1
    first = positions[places[batch.cu_num_logits[:-1].long()]]
    in_prompt = torch.arange(num_reqs) >= num_reqs - prompts
    seq_lens = (first + num_rows).int()
    prefill_len = torch.zeros(len(batch.sampling.seeds), dtype=torch.int32)
    goes_on = in_prompt & (torch.arange(num_reqs) % 2 == 0)
    prefill_len[batch.idx_mapping.long()] = torch.where(
        goes_on, seq_lens + 1, torch.where(in_prompt, first + 1, 0)
    ).int()
    layout = Layout(batch.cu_num_logits, tokens, positions, batch.idx_mapping, places, seq_lens, prefill_len)
    return batch.target_logits, layout, batch.sampling, batch.max_num_draft


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
