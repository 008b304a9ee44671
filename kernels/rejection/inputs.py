"""Small inputs of verification and of edits, made from a seed, for the device check and for tests. R: rows of a batch,
V: vocab_size."""

from typing import Any, NamedTuple

import torch

from . import Layout, Sampling, reference
from .adjust import Allowed, BadWords, Bias, Edits, MinTokens, Penalties

# Kernels split a row beside these tokens.
_EDGES = (0, 1, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193)
_GROUP_SIZE = reference.GROUP_SIZE


def integers(rng: torch.Generator, end: Any, *shape: int) -> torch.Tensor:
    """Random int32 numbers in [0, end); `end` may be a tensor of this shape."""
    return (torch.rand(shape, generator=rng) * end).to(torch.int32)


def to_device(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Sampling):
        return Sampling(*to_device(tuple(vars(value).values()), device))
    if isinstance(value, tuple):
        moved = [to_device(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


class Batch(NamedTuple):
    """The arguments of `rejection_sample`."""

    target_logits: torch.Tensor
    cu_num_logits: torch.Tensor
    draft_token_ids: torch.Tensor
    positions: torch.Tensor
    idx_mapping: torch.Tensor
    sampling: Sampling
    max_num_draft: int
    draft_logits: torch.Tensor | None = None


def make_batch(
    num_draft: list[int],  # of each request; -1: it has no rows
    vocab_size: int,
    *,
    dense: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agreement: float = 0.7,
    peaks: bool = False,
    **sampling: Any,
) -> Batch:
    """Makes a ragged batch, with the types and strides of Model Runner V2. Requests use every second state, in random
    order. With a one-hot q, a draft is the token that verification draws with probability `agreement`, and any token
    otherwise. With `dense`, q is p with noise, and drafts are drawn from q. With `peaks`, two of three rows have a
    dozen likely tokens, next to the edges of tiles and groups or within one group. Temperatures are 1 and seeds random
    unless `sampling` has them.
    """
    rng = torch.Generator().manual_seed(seed)
    num_reqs, width, num_rows = len(num_draft), max(num_draft), torch.tensor(num_draft) + 1
    cu_num_logits = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
    local = torch.cat([torch.arange(number) for number in num_rows.tolist()])
    states = torch.randperm(2 * num_reqs, generator=rng)[:num_reqs]
    row_states = states.repeat_interleave(num_rows)
    seeds = torch.randint(-(2**62), 2**62, (2 * num_reqs,), generator=rng)
    parameters = Sampling(**{"temperature": torch.ones(2 * num_reqs), "seeds": seeds, **sampling})
    positions = torch.randint(1000, (num_reqs,), generator=rng).repeat_interleave(num_rows) + local
    logits = (1 if peaks else 3) * _noise(len(local), vocab_size, rng)
    if peaks:
        _add_peaks(logits, rng)
    logits, draft_logits = _padded(logits, dtype), None
    if dense:
        noisy = logits + _noise(len(local), vocab_size, rng).to(dtype)
        heat = parameters.temperature[row_states, None].clamp(min=1e-2)
        drafted = torch.multinomial((noisy.float() / heat).softmax(-1), 1, generator=rng)[:, 0]
        has_draft = local < (num_rows - 1).repeat_interleave(num_rows)
        draft_logits = torch.full((2 * num_reqs, max(width, 1), vocab_size), torch.nan, dtype=dtype)
        draft_logits[row_states[has_draft], local[has_draft]] = noisy[has_draft]
    else:
        drawn = reference.draw_rows(logits, positions, parameters.at(row_states))
        any_token = torch.randint(vocab_size, drawn.shape, generator=rng)
        drafted = torch.where(torch.rand(drawn.shape, generator=rng) < agreement, drawn, any_token)
    fed = drafted.roll(1).int()  # the row before a token drafts it
    return Batch(logits, cu_num_logits, fed, positions, states, parameters, width, draft_logits)


def _noise(num_rows: int, vocab_size: int, rng: torch.Generator) -> torch.Tensor:
    noise = torch.randn(vocab_size + 64 * num_rows, generator=rng)
    return noise.unfold(0, vocab_size, 64)[:num_rows]


def _padded(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same logits [R, V] in rows that begin where vLLM's padded heads let them."""
    num_rows, vocab_size = logits.shape
    padded = torch.empty(num_rows, -(-vocab_size // 64) * 64, dtype=dtype)
    return padded[:, :vocab_size].copy_(logits)


def _add_peaks(logits: torch.Tensor, rng: torch.Generator) -> None:
    """Raises tokens of two of three rows to logits that differ in bfloat16, too."""
    num_rows, vocab_size = logits.shape
    edges = torch.tensor(sorted({edge for edge in _EDGES if edge < vocab_size} | {vocab_size - 2, vocab_size - 1}))
    first = integers(rng, -(-vocab_size // _GROUP_SIZE), num_rows, 1).long() * _GROUP_SIZE
    within = torch.rand(num_rows, _GROUP_SIZE, generator=rng).argsort(1)[:, : len(edges)]
    kinds = torch.arange(num_rows)[:, None] % 3
    tokens = torch.where(kinds == 0, (first + within) % vocab_size, edges)
    heights = 14.25 + 0.125 * torch.rand(tokens.shape, generator=rng).argsort(1)
    heights[::2, -1] += 1  # the last token of the vocabulary is rarely alone
    logits.scatter_(1, tokens, torch.where(kinds == 2, logits.gather(1, tokens), heights))


def as_step(batch: Batch, prompts: int = 0) -> tuple[torch.Tensor, Layout, Sampling, int]:
    """Returns the arguments of `sample_step` for the same rows, after one more token of each request. The last
    `prompts` requests feed tokens of their prompts; every second one of these prompts continues after the step."""
    num_reqs, num_rows = len(batch.idx_mapping), batch.cu_num_logits.diff()
    rows = torch.arange(len(batch.positions))
    places = rows + torch.arange(num_reqs).repeat_interleave(num_rows) + 1
    tokens, positions = (torch.full((len(rows) + num_reqs,), 7, dtype=dtype) for dtype in (torch.int32, torch.int64))
    tokens[places], positions[places] = batch.draft_token_ids.int(), batch.positions - 1
    first = positions[places[batch.cu_num_logits[:-1].long()]]
    seq_lens = (first + num_rows).int()
    requests = torch.arange(num_reqs)
    length = torch.where(requests % 2 == 0, seq_lens + 1, first + 1)
    prefill_len = torch.zeros(len(batch.sampling.seeds), dtype=torch.int32)
    prefill_len[batch.idx_mapping.long()] = (length * (requests >= num_reqs - prompts)).int()
    layout = Layout(batch.cu_num_logits, tokens, positions, batch.idx_mapping, places, seq_lens, prefill_len)
    return batch.target_logits, layout, batch.sampling, batch.max_num_draft


def make_edits(batch: Batch, seed: int = 0) -> Edits:
    """Makes edits of every kind; every fourth state has none. Lists have up to several blocks of entries. Prompts end
    near a request's first row, where stop tokens may also occur. Histories and the beginnings of bad words use few
    different tokens, so that they match. Arrays continue after the end of their lists."""
    rng = torch.Generator().manual_seed(seed)
    vocab_size, num_states, num_words, max_word = batch.target_logits.shape[1], len(batch.sampling.seeds), 24, 4
    states = torch.arange(num_states)
    asks = states % 4 != 3
    pool = torch.randperm(vocab_size, generator=rng)[:2048].int()

    def lists(longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = integers(rng, len(pool), num_states, 1) + torch.arange(longest)
        return integers(rng, min(longest, len(pool)) + 1, num_states) * asks, pool[first % len(pool)]

    def few(*shape: int) -> torch.Tensor:
        return pool[integers(rng, min(2, len(pool)), *shape)]

    lengths = torch.zeros(num_states, dtype=torch.int32)
    lengths[batch.idx_mapping.long()] = batch.positions[batch.cu_num_logits[:-1].long()].int()
    repetition, frequency, presence = (torch.randn(num_states, generator=rng) * asks * 0.5 for _ in range(3))
    prompts = torch.randint(-(2**31), 2**31 - 1, (num_states, (vocab_size + 31) // 32), generator=rng).int()
    ends = (1 + integers(rng, max_word, num_states, num_words)).cumsum(1).int()
    words = few(num_states, num_words * max_word)
    words.scatter_(1, ends.long() - 1, pool[integers(rng, len(pool), num_states, num_words)])
    num_allowed, allowed = lists(1024)
    biased = lists(1024)
    return Edits(
        Allowed(num_allowed * (states % 2).int(), allowed),
        Bias(*biased, torch.randn(biased[1].shape, generator=rng)),
        MinTokens(*lists(16), lengths + integers(rng, 5, num_states) - 1),
        Penalties(repetition.exp(), frequency, presence, prompts, integers(rng, 3, num_states, vocab_size)),
        BadWords(
            integers(rng, num_words + 1, num_states) * asks,
            torch.nn.functional.pad(ends, (1, 0)),
            words,
            few(num_states, (int(lengths.max()) // 16 + 1) * 16),
            (lengths - integers(rng, 3, num_states)).clamp(min=0),
        ),
    )
