"""Trees in Triton. Attention runs one program per request, tile of tokens and KV head; `walk` one per request; and
`compact` one per layer, request and head."""

import torch
import triton
import triton.language as tl

from . import MAX_WIDTH, Cache, Mask, Query

_TILE = 32  # keys that a program reads at once
_ROWS = 16  # minimum of tensor cores
_WORDS = {2: tl.int16, 4: tl.int32}  # type of a moved element, by its bytes


@triton.jit
def _attend_kernel(
    out_ptr,
    query,
    cache,
    mask,
    scale,
    table_stride,
    # of query and output by token and head, of keys and values by block, slot and head
    strides,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Runs an online softmax over the tiles of a request's keys."""
    request, kv_head = tl.program_id(0), tl.program_id(2)
    query_ptr, starts_ptr, seq_lens_ptr, table_ptr = query
    key_ptr, value_ptr, bits_ptr, first_ptr = cache[0], cache[1], mask[0], mask[1]
    query_strides, out_strides, key_strides, value_strides = strides
    start = tl.load(starts_ptr + request)
    num_tokens = tl.load(starts_ptr + request + 1) - start
    first_row = tl.program_id(1) * (ROWS // QUERIES_PER_KV)
    if first_row >= num_tokens:
        return
    before, first = tl.load(seq_lens_ptr + request) - num_tokens, tl.load(first_ptr + request)
    lanes, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    row, head = first_row + lanes // QUERIES_PER_KV, kv_head * QUERIES_PER_KV + lanes % QUERIES_PER_KV
    is_row = (lanes // QUERIES_PER_KV < ROWS // QUERIES_PER_KV) & (row < num_tokens)
    is_dim, token = dims < HEAD_SIZE, (start + row).to(tl.int64)
    inside = is_row[:, None] & is_dim[None, :]
    offsets = token[:, None] * query_strides[0] + head[:, None] * query_strides[1] + dims[None, :]
    q = tl.load(query_ptr + offsets, mask=inside, other=0.0)
    bits = tl.load(bits_ptr + token, mask=is_row, other=0)
    largest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, DIMS), tl.float32)
    end = before + tl.minimum(num_tokens, first_row + ROWS // QUERIES_PER_KV)
    for tile in range(0, end, TILE):
        place = tile + tl.arange(0, TILE)
        is_key = place < end
        block = tl.load(table_ptr + request * table_stride + place // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = place % BLOCK_SIZE
        keys = key_ptr + block * key_strides[0] + slot * key_strides[1] + kv_head * key_strides[2]
        values = value_ptr + block * value_strides[0] + slot * value_strides[1] + kv_head * value_strides[2]
        k = tl.load(keys[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(values[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        node = place - first
        is_node = (node >= 0) & (node < WIDTH)
        bit = (bits[:, None] >> tl.where(is_node, node, 0).to(tl.int64)[None, :]) & 1
        sees = (place[None, :] <= (before + row)[:, None]) & ((bit == 1) | (is_node == 0)[None, :])
        scores = tl.where(sees, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        newest = tl.maximum(largest, tl.max(scores, axis=1))
        shift = tl.where(newest > float("-inf"), newest, 0.0)
        weights, factor = tl.exp(scores - shift[:, None]), tl.exp(largest - shift)
        total = total * factor + tl.sum(weights, axis=1)
        output, largest = output * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee"), newest
    offsets = token[:, None] * out_strides[0] + head[:, None] * out_strides[1] + dims[None, :]
    tl.store(out_ptr + offsets, output / tl.where(total > 0, total, 1.0)[:, None], mask=inside)


def attend(out: torch.Tensor, query: Query, cache: Cache, mask: Mask, scale: float) -> None:
    num_heads, head_size = query.query.shape[1:]
    block_size, num_kv_heads = cache.key.shape[1:3]
    per_kv = num_heads // num_kv_heads
    rows = max(_ROWS, triton.next_power_of_2(per_kv))
    grid = (len(query.seq_lens), triton.cdiv(query.max_query_len, rows // per_kv), num_kv_heads)
    strides = tuple(tensor.stride()[:count] for tensor, count in ((query.query, 2), (out, 2), *((c, 3) for c in cache)))
    _attend_kernel[grid](
        out, tuple(query[:4]), tuple(cache), tuple(mask), scale, query.block_table.stride(0), strides,
        QUERIES_PER_KV=per_kv, BLOCK_SIZE=block_size, HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size),
        ROWS=rows, TILE=_TILE, WIDTH=MAX_WIDTH, num_warps=4,
    )  # fmt: skip


@triton.jit
def _walk_kernel(
    # [R, W] each
    parents_ptr,
    tokens_ptr,
    drawn_ptr,
    emitted_ptr,
    path_ptr,
    # [R]
    num_emitted_ptr,
    W: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0)
    nodes = tl.arange(0, LANES)
    row = request * W + nodes
    parents = tl.load(parents_ptr + row, mask=nodes < W, other=-1)
    tokens = tl.load(tokens_ptr + row, mask=nodes < W, other=-1)
    drawn = tl.load(drawn_ptr + row, mask=nodes < W, other=-1)
    emitted, path = tl.full((LANES,), -1, tl.int64), tl.zeros((LANES,), tl.int64)
    node, num_emitted = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while node < W:
        token = tl.sum(tl.where(nodes == node, drawn, 0), axis=0)
        emitted = tl.where(nodes == num_emitted, token, emitted)
        path = tl.where(nodes == num_emitted, node, path)
        num_emitted += 1
        follows = (parents == node) & (tokens == token) & (nodes > 0)
        node = tl.min(tl.where(follows, nodes, LANES), axis=0)
        node = tl.where(node < W, node, LANES)
    tl.store(emitted_ptr + row, emitted, mask=nodes < W)
    tl.store(path_ptr + row, path, mask=nodes < W)
    tl.store(num_emitted_ptr + request, num_emitted)


def walk(
    parents: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = parents.shape
    emitted, path = torch.empty_like(parents), torch.empty_like(parents)
    num_emitted = torch.empty(num_rows, dtype=torch.int32, device=parents.device)
    _walk_kernel[(num_rows,)](
        parents.contiguous(), tokens.contiguous(), drawn.contiguous(), emitted, path, num_emitted,
        W=width, LANES=max(2, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
    return emitted, num_emitted, path


@triton.jit(do_not_specialize=["table_stride"])
def _compact_kernel(
    pointers_ptr,
    table_ptr,
    root_ptr,
    path_ptr,
    num_nodes_ptr,
    table_stride,
    block_stride,
    head_stride,
    slot_stride,
    W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTENT: tl.constexpr,
    LANES: tl.constexpr,
    WORD: tl.constexpr,
):
    """Moves in the order of the path: no node stands before its target, so none is overwritten before it is moved."""
    layer, request, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cache = tl.load(pointers_ptr + layer).to(tl.pointer_type(WORD))
    lanes = tl.arange(0, LANES)
    at = cache + head.to(tl.int64) * head_stride + lanes
    root, num_nodes = tl.load(root_ptr + request), tl.load(num_nodes_ptr + request)
    for step in range(1, num_nodes):
        node = tl.load(path_ptr + request * W + step)
        if node != step:
            table = table_ptr + request * table_stride
            source, target = root + node, root + step
            source_block = tl.load(table + source // BLOCK_SIZE).to(tl.int64)
            target_block = tl.load(table + target // BLOCK_SIZE).to(tl.int64)
            source = source_block * block_stride + source % BLOCK_SIZE * slot_stride
            target = target_block * block_stride + target % BLOCK_SIZE * slot_stride
            words = tl.load(at + source, mask=lanes < CONTENT)
            tl.store(at + target, words, mask=lanes < CONTENT)


def compact(
    caches: list[torch.Tensor],
    pointers: torch.Tensor,
    block_table: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    num_nodes: torch.Tensor,
) -> None:
    _, num_heads, block_size, content = caches[0].shape
    _compact_kernel[(len(caches), len(root), num_heads)](
        pointers, block_table, root, path.contiguous(), num_nodes, block_table.stride(0), *caches[0].stride()[:3],
        W=path.shape[1], BLOCK_SIZE=block_size, CONTENT=content, LANES=triton.next_power_of_2(content),
        WORD=_WORDS[caches[0].element_size()], num_warps=1,
    )  # fmt: skip
