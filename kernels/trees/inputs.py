"""Random inputs of the kernels for draft trees, for tests and the device check."""

import torch

from ..inputs import integers
from . import Cache, Mask, Query
from .reference import ancestors


def random_parents(num_rows: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """Returns [num_rows, width] int64: each node's parent is a random earlier node; node 0 is its parent itself."""
    return integers(rng, torch.arange(width).clamp(min=1), num_rows, width).long()


def make_attention(
    lengths: list[tuple[int, int]],  # of each request: tokens before its query, tokens of its query
    heads: tuple[int, int, int],  # number of the query's, of keys and values, and the size of one
    width: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Query, Cache, Mask, float]:
    """Returns the arguments of `attend`: queries of at most `width` tokens are trees, longer ones are causal."""
    rng, block_size, (num_heads, num_kv_heads, head_size) = torch.Generator().manual_seed(1), 16, heads
    seq_lens, num_tokens = (torch.tensor(counts) for counts in ([sum(one) for one in lengths], [n for _, n in lengths]))
    starts = torch.nn.functional.pad(num_tokens.cumsum(0), (1, 0))
    max_blocks = (int(seq_lens.max()) - 1) // block_size + 1
    num_blocks = len(lengths) * max_blocks
    table = torch.randperm(num_blocks, generator=rng).int().view(len(lengths), max_blocks)
    bits = torch.full((int(starts[-1]),), -1)
    for start, number in zip(starts.tolist(), num_tokens.tolist(), strict=False):
        if number <= width:
            bits[start : start + number] = ancestors(random_parents(1, number, rng))[1][0]
    query = torch.randn(len(bits), num_heads, head_size, generator=rng).to(dtype)
    both = torch.randn(num_blocks, num_kv_heads, block_size, 2 * head_size, generator=rng).to(dtype)
    ragged = Query(query, starts.int(), seq_lens.int(), table, int(num_tokens.max()))
    mask = Mask(bits, (seq_lens - num_tokens).int())
    return torch.zeros_like(query), ragged, Cache(*both.transpose(1, 2).chunk(2, dim=-1)), mask, head_size**-0.5


def make_walks(num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the arguments of `walk`: the few different tokens make long paths; some trees end early."""
    rng = torch.Generator().manual_seed(1)
    tokens, drawn = torch.randint(3, (2, num_rows, width), generator=rng)
    ends = 1 + integers(rng, width, num_rows, 1)
    return random_parents(num_rows, width, rng), tokens.masked_fill(torch.arange(width) >= ends, -1), drawn


def make_moves(
    paths: list[list[int]],  # nodes of each request
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 48),  # number of them, content of one
    num_layers: int = 3,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Returns caches, and the arguments of `compact` after the pointers; unused nodes follow a path's end."""
    rng, num_rows, block_size = torch.Generator().manual_seed(1), len(paths), 16
    shape, width = (3 * num_rows, heads[0], block_size, heads[1]), 1 + max(map(max, paths))
    caches = [torch.randn(shape, generator=rng).to(dtype) for _ in range(num_layers)]
    table = torch.randperm(3 * num_rows, generator=rng).view(num_rows, 3).int()
    root = torch.randint(3 * block_size - width, (num_rows,), generator=rng)
    path = torch.tensor([nodes + [width - 1] * (width - len(nodes)) for nodes in paths])
    return caches, (table, root, path, torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32))
