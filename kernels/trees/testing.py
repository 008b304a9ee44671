"""Trees and caches of chosen shapes, for tests and for the check of a device."""

import torch

from . import Cache, Mask, Query
from .reference import ancestors


def random_parents(num_rows: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """[num_rows, width] int64: any earlier node, the root its own."""
    below = torch.arange(width).clamp(min=1)
    return (torch.rand(num_rows, width, generator=rng) * below).long() * (torch.arange(width) > 0)


def make_attention(
    lengths: list[tuple[int, int]],  # of each request, tokens before its query and tokens of its query
    heads: tuple[int, int, int],  # of the query, of keys and values, and the size of one
    width: int,
    dtype: torch.dtype,
    seed: int = 1,
) -> tuple[torch.Tensor, Query, Cache, Mask, float]:
    """Arguments of `attend`: a request whose query has `width` tokens or less has a tree, a longer one is causal."""
    rng, block_size = torch.Generator().manual_seed(seed), 16
    num_heads, num_kv_heads, head_size = heads
    num_tokens, num_blocks = sum(own for _, own in lengths), sum((sum(both) - 1) // block_size + 1 for both in lengths)
    most = max((sum(both) - 1) // block_size + 1 for both in lengths)
    order, table, used = torch.randperm(num_blocks, generator=rng).int(), torch.zeros(len(lengths), most).int(), 0
    bits, first, starts = torch.full((num_tokens,), -1), [], [0]
    for request, (before, own) in enumerate(lengths):
        blocks = (before + own - 1) // block_size + 1
        table[request, :blocks] = order[used : used + blocks]
        used += blocks
        if own <= width:
            bits[starts[-1] : starts[-1] + own] = ancestors(random_parents(1, own, rng))[1][0]
        first.append(before)
        starts.append(starts[-1] + own)
    query = torch.randn(num_tokens, num_heads, head_size, generator=rng).to(dtype)
    both = torch.randn(num_blocks, num_kv_heads, block_size, 2 * head_size, generator=rng).to(dtype)
    key, value = both.transpose(1, 2).split(head_size, dim=-1)
    seq_lens = torch.tensor([sum(both) for both in lengths], dtype=torch.int32)
    ragged = Query(query, torch.tensor(starts, dtype=torch.int32), seq_lens, table, max(own for _, own in lengths))
    return torch.zeros_like(query), ragged, Cache(key, value), Mask(bits, torch.tensor(first).int()), head_size**-0.5


def make_walks(num_rows: int, width: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of `walk`, with few tokens, so that paths are long; some trees end early."""
    rng = torch.Generator().manual_seed(seed)
    tokens, drawn = torch.randint(3, (2, num_rows, width), generator=rng)
    ends = torch.randint(1, width + 1, (num_rows, 1), generator=rng)
    return random_parents(num_rows, width, rng), tokens.masked_fill(torch.arange(width) >= ends, -1), drawn


def make_moves(
    paths: list[list[int]],  # nodes of each request
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 48),  # of keys and values, and the content of one
    num_layers: int = 3,
    seed: int = 1,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Caches, and arguments of `compact` after the pointers to them; after a path's end stands that of another."""
    rng, num_rows, block_size = torch.Generator().manual_seed(seed), len(paths), 16
    shape, width = (3 * num_rows, heads[0], block_size, heads[1]), 1 + max(max(path) for path in paths)
    caches = [torch.randn(shape, generator=rng).to(dtype) for _ in range(num_layers)]
    table = torch.randperm(3 * num_rows, generator=rng).view(num_rows, 3).int()
    root = torch.randint(3 * block_size - width, (num_rows,), generator=rng)
    path = torch.tensor([own + [width - 1] * (width - len(own)) for own in paths])
    return caches, (table, root, path, torch.tensor([len(own) for own in paths], dtype=torch.int32))
