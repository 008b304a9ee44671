"""Whether the kernels do on this device what their references do: small inputs of the shapes to come.

For a device on which nothing was ever run: a driver, a compiler or a card may be at odds with what was compiled. The
references run on the CPU. One request of all may differ: a near tie, closer than float32 can tell, may go either way.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .acceptance import Other, observe, predict, worth
from .acceptance.reference import new_state
from .acceptance.testing import make_steps
from .budget.testing import make_shares, shared
from .history_match import history_match
from .history_match.testing import make_lookup
from .rejection import rejection_sample
from .rejection.adjust import adjust
from .rejection.adjust.testing import make_edits
from .rejection.drafts import sample_with_q
from .rejection.step import sample_step
from .rejection.testing import Batch, as_step, make_spiky, to_device
from .steps import RULES, join, limit, newest, tally
from .steps.testing import make_chains, make_step, new_totals
from .trees import attend, compact, walk
from .trees.testing import make_attention, make_moves, make_walks

_SEED = 1
# Sums are rounded otherwise where a multiplication and an addition are one instruction.
_TOLERANCE = 1e-5


class Shapes(NamedTuple):
    """What will be served."""

    vocab_size: int
    # of the model's logits
    dtype: torch.dtype
    max_num_draft: int
    # Whether drafts are drawn, so that verification has a dense q
    samples: bool
    # Whether drafts are looked up in texts on the device, and rated there
    looks_up: bool = False
    # Whether drafts are trimmed on the device to a budget
    trims: bool = False
    # Of attention, where drafts are trees: of queries, of keys, and the size of one
    heads: tuple[int, int, int] | None = None


# Of a check: rows of requests with as many drafts as can be, and numbers of drafts of the others: what follows one that
# is rejected does not matter. A reference takes 0.4 ms a row of 128 k tokens on a core, all checks less than 1 s.
_Requests = tuple[int, list[int]]
_ONE_HOT, _SAMPLED = (12, [1, 0, 0, 0] * 9), (12, [2, 1, 1, 1] * 6)
_EDITED, _DRAWN = (18, [1, 0] * 3), (0, [0] * 16)
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # what the kernels give, and what their references do


class Finding(NamedTuple):
    name: str
    # one sentence; empty: as the reference
    problem: str


def check_device(device: torch.device, shapes: Shapes, only: str | None = None) -> Iterator[Finding]:
    """Runs each operation that serving may need, and compares. A check that raises has a problem, too.

    Args:
        only: the name of one check; None: all.
    """
    for name, differing in _checks(shapes):
        if only not in (None, name):
            continue
        try:
            problem = "differs from its reference" if differing(device) > 1 else ""
        except Exception as error:
            problem = problem_of(error)
        yield Finding(name, problem)


def problem_of(error: Exception) -> str:
    """Of a check that could not run, in one line."""
    return f"cannot run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _checks(shapes: Shapes) -> Iterator[tuple[str, Callable[[torch.device], int]]]:
    """Names, and of how many requests an operation does something else on the device."""
    for dense in [False, True] if shapes.samples else [False]:
        for truncated in (False, True):
            name = "verification" + ", sampled drafts" * dense + ", truncated" * truncated
            yield name, partial(_verifies, shapes, dense, truncated)
    yield "verification, in place", partial(_verifies_in_place, shapes)
    yield "edits", partial(_edits, shapes)
    yield "rows", partial(_counts, shapes)
    if shapes.samples:
        yield "noise", partial(_draws, shapes)
    if shapes.looks_up:
        yield "lookup", partial(_looks_up, shapes)
        yield "acceptance", partial(_rates, shapes)
    if shapes.trims:
        yield "budget", partial(_shares, shapes)
    if shapes.heads is not None:
        yield "trees, attention", partial(_attends, shapes.heads, shapes)
        yield "trees, paths", partial(_walks, shapes)
        yield "trees, moves", partial(_moves, shapes.heads, shapes)


def _verifies(shapes: Shapes, dense: bool, truncated: bool, device: torch.device) -> int:
    batch = _batch(shapes, _SAMPLED if dense else _ONE_HOT, dense, truncated)
    return _rows(_both(rejection_sample, batch, device))


def _verifies_in_place(shapes: Shapes, device: torch.device) -> int:
    return _rows(_both(sample_step, as_step(_batch(shapes, _ONE_HOT, truncated=True), prompts=4), device))


def _edits(shapes: Shapes, device: torch.device) -> int:
    batch = _batch(shapes, _EDITED)
    edits = make_edits(batch)
    assert edits.bad_words is not None
    history = edits.bad_words.history.flatten()
    batch = batch._replace(draft_token_ids=history[torch.arange(len(batch.draft_token_ids)) % len(history)])
    return 2 * _rows(_both(adjust, (*batch[:5], edits, batch.max_num_draft), device), _TOLERANCE)


def _draws(shapes: Shapes, device: torch.device) -> int:
    batch = _batch(shapes, _DRAWN, truncated=True)
    sampling = batch.sampling.at(batch.idx_mapping.repeat_interleave(batch.cu_num_logits.diff()))
    sampling = replace(sampling, temperature=sampling.temperature.clamp(min=0.4))  # or else there is no q
    return _rows(_both(sample_with_q, (batch.target_logits, batch.positions, sampling), device))


def _looks_up(shapes: Shapes, device: torch.device, seed: int = 1) -> int:
    lookup = make_lookup(shapes.max_num_draft, seed=seed)
    moved = to_device(lookup, device)  # whose distances are written

    def operation(*_: Any, implementation: str) -> Any:
        own = moved if implementation == "fused" else lookup
        run: Any = history_match
        return *run(*own, implementation=implementation), own.texts.distances

    return 2 * _rows(_both(operation, (), device))  # no sums, no ties: one that differs is one too many


def _counts(shapes: Shapes, device: torch.device) -> int:
    def operation(rows: Any, lengths: Any, *others: Any, implementation: str) -> list[torch.Tensor]:
        limits, most, num_draft, staged, first, second = others
        mapping, totals = torch.zeros_like(num_draft), new_totals(len(lengths), shapes.max_num_draft, num_draft.device)
        slots, wanted, of_stages = limit(rows, lengths, limits, most, mapping, (2, 1), implementation)
        tally(totals, rows, wanted, num_draft, shapes.max_num_draft, staged, implementation)
        read = newest(mapping, lengths, lengths.long(), (lengths.float(), lengths.long()), implementation)
        joined = [join(first, second, rule, True, implementation) for rule in RULES]
        return [slots, wanted, mapping, *totals[:2], *of_stages, *read, *(own for every in joined for own in every)]

    step, chains = make_step(40, shapes.max_num_draft), make_chains(40, shapes.max_num_draft)
    return 2 * _rows(_both(operation, (*step, *chains), device))


def _shares(shapes: Shapes, device: torch.device) -> int:
    places = ("fused", device), ("reference", torch.device("cpu"))
    shares = list(make_shares(12, shapes.max_num_draft))
    ours, expected = (torch.cat([bounds for share in shares for bounds in shared(share, *place)]) for place in places)
    return 2 * int((ours != expected).any())


def _attends(heads: tuple[int, int, int], shapes: Shapes, device: torch.device) -> int:
    width = shapes.max_num_draft + 1
    _, *arguments = make_attention([(5, 40), (100, width), (2, width), (31, 1)], heads, width, shapes.dtype)

    def operation(ragged: Any, *others: Any, implementation: str) -> Any:
        out = torch.zeros_like(ragged.query)
        run: Any = attend
        run(out, ragged, *others, implementation=implementation)
        return out

    return 2 * _rows(_both(operation, tuple(arguments), device), 2e-2)  # of a dtype with 8 bits


def _walks(shapes: Shapes, device: torch.device) -> int:
    return 2 * _rows(_both(walk, make_walks(50, shapes.max_num_draft + 1), device))


def _moves(heads: tuple[int, int, int], shapes: Shapes, device: torch.device) -> int:
    _, num_kv_heads, head_size = heads
    caches, moves = make_moves([[0, 2, 3], [0, 1, 3], [0], [0, 3]], shapes.dtype, (num_kv_heads, 2 * head_size))

    def operation(*arguments: Any, implementation: str) -> list[torch.Tensor]:
        own = [cache.to(arguments[0].device, copy=True) for cache in caches]
        pointers = torch.tensor([cache.data_ptr() for cache in own], dtype=torch.uint64, device=own[0].device)
        run: Any = compact
        run(own, pointers, *arguments, implementation=implementation)
        return own

    return 2 * _rows(_both(operation, moves, device))


def _rates(shapes: Shapes, device: torch.device, num_stages: int = 2) -> int:
    steps = make_steps(4, 20, num_stages, shapes.max_num_draft)

    def operation(*_: Any, implementation: str) -> list[torch.Tensor]:
        there = device if implementation == "fused" else torch.device("cpu")
        results: list[torch.Tensor] = []
        state = new_state(num_stages, 41, shapes.max_num_draft, there)
        for slots, drafts, sampled, rejected in to_device(tuple(steps), there):
            accept_probs = torch.zeros_like(drafts.confidence)
            tables = tuple(torch.zeros(2, 41, drafts.stage.shape[1], device=there))
            copies, asked = torch.zeros(41, 1, device=there), (slots % 3).int()
            for continues in (True, False):
                other = Other(1, shapes.max_num_draft, continues, asked)
                results += worth(state, slots, drafts, other, (copies, 1.0), implementation)
            predict(state, slots, drafts, accept_probs, implementation, tables=tables)
            observe(state, slots, sampled, rejected, implementation)
            results += [copies, accept_probs, *tables]
        # What the last steps predict and what is known go by all of what was learned.
        return [*results, *state[:4]]

    return 2 * _rows(_both(operation, (), device), _TOLERANCE)


def _batch(shapes: Shapes, requests: _Requests, dense: bool = False, truncated: bool = False) -> Batch:
    num_long_rows, short = requests
    num_long = max(1, num_long_rows // (shapes.max_num_draft + 1))
    num_draft = [shapes.max_num_draft] * num_long + short
    return make_spiky(num_draft, shapes.vocab_size, shapes.dtype, dense, _SEED, truncated)


def _both(operation: Any, arguments: tuple[Any, ...], device: torch.device) -> _Pairs:
    expected = operation(*arguments, implementation="reference")
    ours = operation(*to_device(arguments, device), implementation="fused")
    pairs = ((ours, expected),) if isinstance(ours, torch.Tensor) else zip(ours, expected, strict=True)
    return [(mine.cpu(), theirs) for mine, theirs in pairs]


def _rows(pairs: _Pairs, tolerance: float = 0.0) -> int:
    """How many rows of results differ."""
    close = partial(torch.isclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    differs = [(~close(*pair)).view(len(pair[0]), -1).any(1) for pair in pairs]
    same_length = all(len(rows) == len(differs[0]) for rows in differs)
    return int(torch.stack(differs).any(0).sum() if same_length else sum(rows.sum() for rows in differs))
