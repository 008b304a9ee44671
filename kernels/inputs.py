"""Small inputs of the operations beside verification (rejection/inputs.py), made from a seed."""

from collections.abc import Iterator
from typing import Any

import torch

from . import acceptance
from .history_match import NO_MATCH, References, Texts
from .rejection.inputs import integers
from .steps import KINDS, SUMS, Chain, Rows, Staged, Totals
from .trees import Cache, Mask, Query
from .trees.reference import ancestors


def make_outcomes(num_steps: int, num_rows: int, num_stages: int, max_num_draft: int, seed: int = 1) -> list[Any]:
    """Returns slots, drafts, num_sampled and num_rejected of each step; the last two rows of many are padding."""
    rng, steps = torch.Generator().manual_seed(seed), []
    for _ in range(num_steps):
        slots = torch.randperm(2 * num_rows, generator=rng)[:num_rows]
        num_draft = integers(rng, max_num_draft + 1, num_rows)
        stage = integers(rng, num_stages, num_rows, max_num_draft)
        confidence = 0.5 + 9 * torch.rand((num_rows, 1), generator=rng) + torch.arange(max_num_draft)
        confidence[::3] = torch.rand(confidence[::3].shape, generator=rng)  # probabilities
        verified = integers(rng, num_draft + 1, num_rows)
        accepted = torch.minimum(integers(rng, 2 * verified + 1, num_rows), verified)
        sampled = torch.where(integers(rng, 8, num_rows) == 0, 0, accepted + 1)  # 0: the prompt goes on
        if num_rows > 4:
            slots[-2:], num_draft[-2:], sampled[-2:], verified[-2:] = 2 * num_rows, 0, 0, 0
        rejected = torch.where(sampled > 0, verified - accepted, 0)
        steps.append((slots, acceptance.Drafts(num_draft, stage, confidence), sampled, rejected))
    return steps


def make_budgets(num_rows: int, max_num_draft: int, num_slots: int = 16) -> Iterator[tuple[Any, Any, Any, int]]:
    """Yields arguments of `share_budget`, for none, some and all drafts; at first many probabilities are equal."""
    rng = torch.Generator().manual_seed(1)
    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    probs = torch.rand(num_slots, max_num_draft, generator=rng)
    for accept_probs in ((4 * probs).round() / 4, probs):
        num_draft = integers(rng, max_num_draft + 1, num_rows)
        num_tokens = torch.stack((num_draft, 1 + integers(rng, 3, num_rows)))
        total = int(num_draft.sum())
        for budget in sorted({0, min(1, total), total // 3, total // 2, max(0, total - 1), total}):
            yield accept_probs, slots, num_tokens, budget


def make_lookup(max_num_draft: int, num_reqs: int = 12) -> tuple[Any, ...]:
    """Returns the arguments of `history_match`: a third of the requests ends as its text went on, a third as its
    reference did; the last row wants nothing."""
    rng, shortest, longest = torch.Generator().manual_seed(1), 1_100, 2_600
    texts, others = (integers(rng, 40, num_reqs, longest + 8) for _ in range(2))
    lengths, sizes = (shortest + integers(rng, longest + 1 - shortest, num_reqs) for _ in range(2))
    for slot, length in enumerate(lengths.tolist()):
        place = 20 + int(integers(rng, shortest - 20, 1))
        if slot % 3:
            texts[slot, length - 20 : length] = (texts, others)[slot % 2][slot, place - 20 : place].clone()
    distances = 1 + integers(rng, shortest - 1, num_reqs, 2)
    distances[::4] = NO_MATCH
    max_draft = torch.full((num_reqs,), max_num_draft, dtype=torch.int32)
    max_draft[-1] = 0
    references = References(others.flatten(), torch.arange(num_reqs) * (longest + 8), sizes)
    slots = torch.randperm(num_reqs, generator=rng)
    return Texts(texts, lengths, distances), slots, max_draft, max_num_draft, 2, 8, references


def make_step(num_rows: int, max_num_draft: int) -> tuple[Rows, Any, Any, Any, Any, Staged]:
    """Returns Rows, lengths, limits, the step's limit, drafted tokens and Staged of `steps.limit` and `steps.tally`;
    the last two rows of many are padding."""
    rng, num_slots = torch.Generator().manual_seed(1), 2 * num_rows
    slots = torch.randperm(num_slots, generator=rng)[:num_rows]
    sampled = integers(rng, max_num_draft + 2, num_rows)
    if num_rows > 4:
        slots[-2:], sampled[-2:] = num_slots, 0
    rejected = integers(rng, max_num_draft + 2 - sampled, num_rows) * (sampled > 0)
    allowed = ((torch.arange(num_slots) % number > 0).int() for number in (2, 3))  # of two stages
    limits = integers(rng, max_num_draft + 1, num_slots), *integers(rng, 50, 2, num_slots), *allowed
    sent = integers(rng, max_num_draft + 1, num_slots + 1), integers(rng, 2, num_slots + 1, max_num_draft)
    first, second = (integers(rng, max_num_draft + 2, num_rows) - 1 for _ in range(2))
    stage, agreed = integers(rng, 2, num_rows, max_num_draft), integers(rng, 2, num_rows)
    staged = Staged(*sent, sampled, rejected, stage, first, second, agreed)
    lengths, num_draft = integers(rng, 40, num_slots), integers(rng, max_num_draft + 1, num_rows)
    max_tokens = torch.tensor(max_num_draft, dtype=torch.int32)
    return Rows(slots, sampled, rejected), lengths, torch.stack(limits, 1), max_tokens, num_draft, staged


def make_chains(num_rows: int, max_num_draft: int, seed: int = 1) -> tuple[Chain, Chain]:
    """Returns drafts of a lookup, and of a stage that drafts one token less and often the same."""
    rng, num_steps = torch.Generator().manual_seed(seed), max(1, max_num_draft - 1)
    first = integers(rng, 99, num_rows, max_num_draft)
    second = (first + (integers(rng, 8, num_rows, max_num_draft) == 0))[:, :num_steps].contiguous()
    counts = integers(rng, max_num_draft + 1, num_rows), integers(rng, num_steps + 1, num_rows)
    counts[0][::4] = counts[1][::3] = 0
    confidences = integers(rng, 9, num_rows, max_num_draft).long(), torch.rand(num_rows, num_steps, generator=rng)
    return Chain(first, counts[0], confidences[0]), Chain(second, counts[1], confidences[1])


def new_totals(num_slots: int, max_num_draft: int, device: Any, once: int = 1) -> Totals:
    width, num_stages = max_num_draft + 2, 2
    size = width * (width + 2) + num_stages * (len(KINDS) * max_num_draft + len(SUMS))
    cells, by_slot = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((size,), (num_slots + 1, 2)))
    return Totals(cells, by_slot, torch.full((1,), once, dtype=torch.int64, device=device))


def random_parents(num_rows: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """Returns [num_rows, width] int64: each node's parent is any earlier node; node 0 has itself."""
    return integers(rng, torch.arange(width).clamp(min=1), num_rows, width).long()


def make_attention(
    lengths: list[tuple[int, int]],  # of each request: tokens before its query, tokens of its query
    heads: tuple[int, int, int],  # number of the query's, of keys and values, and the size of one
    width: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Query, Cache, Mask, float]:
    """Returns the arguments of `attend`: queries of up to `width` tokens are trees, longer ones are causal."""
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
    """Returns the arguments of `walk`: few different tokens make paths long; some trees end early."""
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
    """Returns caches, and the arguments of `compact` after their pointers; other nodes stand after a path's end."""
    rng, num_rows, block_size = torch.Generator().manual_seed(1), len(paths), 16
    shape, width = (3 * num_rows, heads[0], block_size, heads[1]), 1 + max(map(max, paths))
    caches = [torch.randn(shape, generator=rng).to(dtype) for _ in range(num_layers)]
    table = torch.randperm(3 * num_rows, generator=rng).view(num_rows, 3).int()
    root = torch.randint(3 * block_size - width, (num_rows,), generator=rng)
    path = torch.tensor([nodes + [width - 1] * (width - len(nodes)) for nodes in paths])
    return caches, (table, root, path, torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32))
