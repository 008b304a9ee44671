"""Draft trees: the attention of their tokens, the path that the target follows, and the move of the path's keys and
values. Cai et al. 2024 ("Medusa"), Miao et al. 2024 ("SpecInfer") verify trees.

Nodes are in topological order, and node 0 is the request's newest token. A node's index gives its place in the KV
cache, its depth its position. A prefix of a tree is a tree. `walk` needs no acceptance rule: with a one-hot q the noise
alone decides the token after a node (rejection/drafts.py), so it follows the child with this token. R: requests, S:
slots of requests, W: nodes of a tree, root included, at most MAX_WIDTH.
"""

from typing import Any, NamedTuple

from ..implementations import module_of

MAX_WIDTH = 64  # bits of a mask


class Cache(NamedTuple):
    """Paged keys and values of a layer, [num_blocks, block_size, num_kv_heads, head_size] each."""

    key: Any
    value: Any


class Query(NamedTuple):
    """A ragged batch: request r has the tokens starts[r] to starts[r + 1], which are its last ones in the cache.

    Args:
        query: [num_tokens, num_heads, head_size]
        starts, seq_lens: [R + 1] and [R] int32; the lengths include these tokens.
        block_table: [R, max_num_blocks] int32
        max_query_len: of all requests.
    """

    query: Any
    starts: Any
    seq_lens: Any
    block_table: Any
    max_query_len: int


class Mask(NamedTuple):
    """Bit i of a token's `bits`, [>= num_tokens] int64, states whether the token sees place first + i, for MAX_WIDTH
    places; `first` is [>= R] int32. It sees all earlier places, and none after itself. With all bits set the mask is
    causal."""

    bits: Any
    first: Any


def attend(out: Any, query: Query, cache: Cache, mask: Mask, scale: float, implementation: str | None = None) -> None:
    """Writes the attention's output to `out`, [num_tokens, num_heads, head_size]."""
    module_of(__name__, query.query, implementation).attend(out, query, cache, mask, scale)


def walk(
    parents: Any,  # [R, W] int64, of each request's tree
    tokens: Any,  # [R, W] int64, of the nodes; -1: no node
    drawn: Any,  # [R, W] int64, the target's token after each node
    implementation: str | None = None,
) -> tuple[Any, Any, Any]:
    """Follows the drawn tokens from the root, as long as a child has the drawn token. Returns emitted tokens [R, W]
    int64, padded with -1, their number [R] int32, and the nodes at which they were drawn [R, W] int64, padded with 0.

    >>> import torch
    >>> walk(torch.tensor([[0, 0, 0, 2]]), torch.tensor([[9, 4, 5, 6]]), torch.tensor([[5, 1, 6, 8]]))
    (tensor([[ 5,  6,  8, -1]]), tensor([3], dtype=torch.int32), tensor([[0, 2, 3, 0]]))
    """
    return module_of(__name__, parents, implementation).walk(parents, tokens, drawn)


def compact(
    caches: Any,  # [num_layers, num_blocks, num_kv_heads, block_size, content], one tensor each
    pointers: Any,  # [num_layers] uint64, addresses of the caches
    block_table: Any,  # [R, max_num_blocks] int32
    root: Any,  # [R] int64, the root's place
    path: Any,  # [R, W] int64: nodes, in ascending order
    num_nodes: Any,  # [R] int32, of the path
    implementation: str | None = None,
) -> None:
    """Moves the keys and values of a path to the places after the root, in every layer."""
    module_of(__name__, caches[0], implementation).compact(caches, pointers, block_table, root, path, num_nodes)
