"""Trees: compares attention with dense attention, paths with a search of a few lines, and the kernels with the
reference.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
"""

from typing import Any

import pytest
import torch
from batches import p_value
from interpreted import DEVICE, RUNS, by_reference, needs_triton
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.kernels.rejection.inputs import to_device
from vllm_specplugins.kernels.trees import Mask, Query, attend, compact, walk
from vllm_specplugins.kernels.trees.inputs import make_attention, make_moves, make_walks, random_parents
from vllm_specplugins.kernels.trees.reference import ancestors

# Ragged: a prompt's chunk, a tree, one that was cut, a request without a draft, none before the query.
LENGTHS = [(5, 40), (37, 16), (100, 7), (70, 1), (0, 3), (15, 16)]
HEADS = [(4, 2, 32), (3, 1, 24), (8, 8, 64)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def dense(query: Query, cache: Any, mask: Mask, scale: float, request: int) -> torch.Tensor:
    """One request by a loop over its tokens."""
    begin, end, length = int(query.starts[request]), int(query.starts[request + 1]), int(query.seq_lens[request])
    size, num_kv_heads = cache.key.shape[1:3]
    keys, values = (
        torch.stack([part[int(query.block_table[request, at // size]), at % size] for at in range(length)])
        for part in cache
    )
    per_kv, rows = query.query.shape[1] // num_kv_heads, []
    for index in range(begin, end):
        at_token, bits, first = length - end + index, int(mask.bits[index]), int(mask.first[request])
        seen = [at for at in range(at_token + 1) if not first <= at < first + 64 or bits >> (at - first) & 1]
        for head in range(query.query.shape[1]):
            scores = keys[seen, head // per_kv].double() @ query.query[index, head].double() * scale
            rows.append(scores.softmax(0) @ values[seen, head // per_kv].double())
    return torch.stack(rows).view(end - begin, *query.query.shape[1:])


@by_reference
@pytest.mark.parametrize("heads", HEADS)
def test_attention_as_dense(heads: tuple[int, int, int]) -> None:
    """Kills: a bit of another place or node, a block of another request, a head of another group, a chunk that is not
    causal, a place after the mask's window that is hidden."""
    out, *arguments = make_attention([*LENGTHS, (3, 90)], heads, 16, torch.float32)
    attend(out, *arguments, implementation="reference")
    query, starts = arguments[0], arguments[0].starts.tolist()
    for request in range(len(query.seq_lens)):
        expected = dense(*arguments, request).float()
        torch.testing.assert_close(out[starts[request] : starts[request + 1]], expected, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_equals_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Kills, in the kernel, what the test above does in the reference, and a tile that is left out or counted twice."""
    out, *arguments = make_attention(LENGTHS, heads, 16, dtype)
    attend(out, *arguments, implementation="reference")
    ours = torch.full_like(out, torch.nan).to(DEVICE)
    attend(ours, *to_device(tuple(arguments), DEVICE), implementation="fused")
    torch.testing.assert_close(ours.cpu(), out, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@by_reference
@pytest.mark.parametrize("width", [1, 2, 5, 16, 32])
def test_ancestors(width: int) -> None:
    """Kills: a generation too few; a mask without the root, or the node."""
    parents = random_parents(20, width, torch.Generator().manual_seed(2))
    depths, bits = ancestors(parents)
    for row in range(20):
        for node in range(width):
            line = [node]
            while line[-1]:
                line.append(int(parents[row, line[-1]]))
            assert int(depths[row, node]) == len(line) - 1
            assert int(bits[row, node]) == sum(1 << above for above in line)


def test_walk() -> None:
    """Fails if a token leads to another parent's child, or to a node that does not exist, or if the last token is not
    emitted."""
    name, device = ("fused", DEVICE) if RUNS else ("reference", "cpu")
    for width in (1, 2, 7, 16):
        parents, tokens, drawn = make_walks(50, width)
        results = walk(*(part.to(device) for part in (parents, tokens, drawn)), implementation=name)
        emitted, num_emitted, path = (part.tolist() for part in results)
        for row in range(50):
            line = [0]
            while True:
                token = int(drawn[row, line[-1]])
                children = [n for n in range(1, width) if parents[row, n] == line[-1] and tokens[row, n] == token]
                if not children:
                    break
                line.append(children[0])
            assert num_emitted[row] == len(line)
            assert path[row] == line + [0] * (width - len(line))
            assert emitted[row] == [int(drawn[row, node]) for node in line] + [-1] * (width - len(line))


@by_reference
@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_distribution(temperature: float) -> None:
    """Of the first two tokens, whatever is drafted, good trees and bad ones, of tokens that the noise chooses, too.
    Kills: noise of a node's index, which siblings would not share, or of its parent's position; a token that is emitted
    for being drafted."""
    num_rows, width, size = 20_000, 6, 4
    rng = torch.Generator().manual_seed(5)
    table = 1.5 * torch.randn(size + 1, size, generator=rng)  # what follows each token; the last row follows the root
    parents, seeds = random_parents(num_rows, width, rng), torch.arange(num_rows)
    depths, _ = ancestors(parents)
    sampling = Sampling(torch.full((num_rows,), temperature), seeds)
    likely = coupled_sample(table[-1:].expand(num_rows, -1), torch.full((num_rows,), 10), sampling)
    tokens = torch.randint(size, (num_rows, width), generator=rng)
    tokens[:, 1], tokens[:, 0] = torch.where(seeds % 2 == 0, likely, tokens[:, 1]), size
    states = seeds.repeat_interleave(width)
    drawn = coupled_sample(table[tokens.flatten()], (10 + depths).flatten(), sampling.at(states)).view(num_rows, width)
    emitted, num_emitted, _ = walk(parents, tokens, drawn, implementation="reference")
    first = (table[-1] / temperature).softmax(0)
    after = (table[:-1] / temperature).softmax(1)
    assert p_value(emitted[:, 0], first) > 1e-3
    both = emitted[num_emitted > 1]
    # Given that a step went on, the first token is biased, as it may be; the second is not.
    for token in range(size):
        assert p_value(both[both[:, 0] == token, 1], after[token]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact(dtype: torch.dtype) -> None:
    """Paths across blocks, of one node and of all. Kills: a slot of another block, layer, head or request; a node that
    is overwritten before it is moved; one of the last path's, which is shorter now, that moves."""
    name, device = ("fused", DEVICE) if RUNS else ("reference", "cpu")
    paths = [[0, 2, 3, 9], [0, 1, 5, 7, 8, 9], [0], [0, 11]]
    caches, (table, root, path, num_nodes) = make_moves(paths, dtype)
    caches = [cache.to(device) for cache in caches]
    expected = [cache.clone() for cache in caches]
    for before, after in zip(caches, expected, strict=True):
        for request, nodes in enumerate(paths):
            places = [(int(table[request, at // 16]), at % 16) for at in (root[request] + torch.arange(12)).tolist()]
            for step, node in enumerate(nodes):
                (to, to_slot), (of, of_slot) = places[step], places[node]
                after[to, :, to_slot] = before[of, :, of_slot]
    pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64, device=device)
    compact(caches, pointers, *(part.to(device) for part in (table, root, path, num_nodes)), implementation=name)
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours, theirs)
