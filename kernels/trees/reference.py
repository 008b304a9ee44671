"""Trees in PyTorch, on any device, with dense attention for one request at a time."""

import torch

from . import MAX_WIDTH, Cache, Mask, Query


def ancestors(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns depths [N, W] and masks of ancestors [N, W], the node itself included, for parents [N, W] int64.

    >>> ancestors(torch.tensor([[0, 0, 0, 1]]))
    (tensor([[0, 1, 1, 2]]), tensor([[ 1,  3,  5, 11]]))
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    depths, bits = (nodes > 0).long().expand_as(parents), (torch.ones_like(nodes) << nodes).expand_as(parents)
    for _ in range((parents.shape[1] - 1).bit_length()):  # twice as many generations each time
        depths, bits = depths + depths.gather(1, parents), bits | bits.gather(1, parents)
        parents = parents.gather(1, parents)
    return depths, bits


def attend(out: torch.Tensor, query: Query, cache: Cache, mask: Mask, scale: float) -> None:
    block_size, num_kv_heads = cache.key.shape[1:3]
    for request, (start, end) in enumerate(zip(query.starts[:-1].tolist(), query.starts[1:].tolist(), strict=True)):
        length, first = int(query.seq_lens[request]), int(mask.first[request])
        if start == end:
            continue
        places = torch.arange(length, device=out.device)
        blocks, offsets = query.block_table[request].long()[places // block_size], places % block_size
        per_kv = query.query.shape[1] // num_kv_heads
        key, value = (part[blocks, offsets].repeat_interleave(per_kv, dim=1).float() for part in cache)
        at = torch.arange(length - (end - start), length, device=out.device)
        is_node = (places >= first) & (places < first + MAX_WIDTH)
        bit = mask.bits[start:end, None] >> (places - first).clamp(0, MAX_WIDTH - 1) & 1
        sees = (places <= at[:, None]) & ((bit == 1) | ~is_node)
        scores = torch.einsum("qhd,khd->hqk", query.query[start:end].float(), key) * scale
        probs = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", probs, value).to(out.dtype)


def walk(
    parents: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = parents.shape
    emitted, path = torch.full_like(drawn, -1), torch.zeros_like(parents)
    node, goes_on = torch.zeros_like(parents[:, 0]), torch.ones_like(parents[:, 0], dtype=torch.bool)
    num_emitted = torch.zeros(num_rows, dtype=torch.int32, device=drawn.device)
    is_child = torch.arange(width, device=drawn.device) > 0
    for step in range(width):
        token = drawn.gather(1, node[:, None])
        emitted[:, step] = torch.where(goes_on, token[:, 0], -1)
        path[:, step] = torch.where(goes_on, node, 0)
        num_emitted += goes_on
        follows = (parents == node[:, None]) & (tokens == token) & is_child
        goes_on = goes_on & follows.any(dim=1)
        node = torch.where(goes_on, follows.int().argmax(dim=1), node)
    return emitted, num_emitted, path


def compact(
    caches: list[torch.Tensor],
    pointers: torch.Tensor,
    block_table: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    num_nodes: torch.Tensor,
) -> None:
    size = caches[0].shape[2]
    steps = torch.arange(path.shape[1], device=path.device)
    moves = ((steps < num_nodes[:, None]) & (path != steps)).nonzero(as_tuple=True)
    requests, targets = moves
    places = [root[requests] + node for node in (path[moves], targets)]
    (source, source_offset), (target, target_offset) = (
        (block_table[requests, place // size].long(), place % size) for place in places
    )
    for cache in caches:
        cache[target, :, target_offset] = cache[source, :, source_offset]
