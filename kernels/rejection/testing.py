"""Inputs for the tests, the benchmark and the check of a device: ragged batches of every kind."""

from typing import Any, NamedTuple

import torch

from . import Sampling
from .arguments import Layout


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


def make_batch(
    num_draft: list[int],
    vocab_size: int,
    *,
    dense: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agreement: float = 0.7,
    **sampling: Any,
) -> Batch:
    """A batch of requests with these numbers of drafts, at temperature 1 but for what `sampling` says.

    Drafts are the most probable token with probability `agreement`, else any; dense ones are drawn from q, which is p
    with some noise. The states of the requests are shuffled among twice as many.
    """
    rng = torch.Generator().manual_seed(seed)
    num_reqs, width = len(num_draft), max(num_draft)
    num_rows = torch.tensor(num_draft) + 1
    cu_num_logits = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
    num_logits = int(cu_num_logits[-1])
    logits = (torch.randn(num_logits, vocab_size, generator=rng) * 3).to(dtype)
    states = torch.randperm(2 * num_reqs, generator=rng)[:num_reqs]
    row_states = states.repeat_interleave(num_rows)
    local = torch.arange(num_logits) - cu_num_logits[:-1].repeat_interleave(num_rows)
    agrees = torch.rand(num_logits, generator=rng) < agreement
    drafted = torch.where(agrees, logits.argmax(-1), torch.randint(vocab_size, (num_logits,), generator=rng))
    draft_logits = None
    parameters = {"temperature": torch.ones(2 * num_reqs), **sampling}
    if dense:
        draft_logits = torch.full((2 * num_reqs, max(width, 1), vocab_size), torch.nan, dtype=dtype)
        noisy = logits + torch.randn(num_logits, vocab_size, generator=rng).to(dtype)
        has_draft = local < (num_rows - 1).repeat_interleave(num_rows)
        draft_logits[row_states[has_draft], local[has_draft]] = noisy[has_draft]
        heat = parameters["temperature"][row_states].clamp(min=1e-2)[:, None]
        drafted = torch.multinomial((noisy.float() / heat).softmax(-1), 1, generator=rng)[:, 0]
    return Batch(
        target_logits=logits,
        cu_num_logits=cu_num_logits,
        draft_token_ids=drafted.roll(1),  # the token fed at a row is drafted by the row before it
        positions=torch.randint(1000, (num_reqs,), generator=rng).repeat_interleave(num_rows) + local,
        idx_mapping=states.int(),
        sampling=Sampling(seeds=torch.randint(-(2**62), 2**62, (2 * num_reqs,), generator=rng), **parameters),
        max_num_draft=width,
        draft_logits=draft_logits,
    )


def as_step(batch: Batch, prompts: int = 0) -> tuple[torch.Tensor, Layout, Sampling, int]:
    """Arguments of `sample_step` for the same rows, each behind one token more of its request.

    Args:
        prompts: so many requests, the last ones, feed tokens of their prompts; every other one's goes on behind them.
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
