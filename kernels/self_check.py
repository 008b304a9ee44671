"""Runs the kernels of a device on small inputs of the shapes that serving uses, since a driver, a compiler or an
untested card may break a kernel. It compares kernels that may change a token with their references, which run on the
CPU; a wrong draft only costs time. One request of a check may differ, since two tokens may swap places if they arrive
closer together than float32 can resolve."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch

from . import inputs
from .acceptance import Other, observe, predict, worth
from .acceptance.reference import new_state
from .budget import Layout, share_budget
from .history_match import history_match
from .rejection import Sampling, rejection_sample, sample_step
from .rejection.adjust import adjust
from .rejection.drafts import coupled_sample, rated_sample, sample_with_q
from .rejection.inputs import Batch, as_step, make_batch, make_edits, to_device
from .rounds.siblings import draw_siblings, try_siblings
from .steps import join, limit, newest, tally
from .trees import attend, compact, walk
from .trees.inputs import make_attention, make_moves, make_walks

# Sums round differently if one instruction multiplies and adds.
_TOLERANCE = 1e-5


class Shapes(NamedTuple):
    vocab_size: int
    # of the model's logits
    dtype: torch.dtype
    max_num_draft: int
    # Whether drafts are sampled, so verification has a dense q
    samples: bool
    # Whether drafts are looked up in texts on the device, and rated there
    looks_up: bool = False
    # Whether the device trims drafts to a budget
    trims: bool = False
    # Where drafts branch: numbers of query heads and of KV heads, and the size of a head
    heads: tuple[int, int, int] | None = None
    # Whether a part of the model drafts, and whether it is a stage of a cascade
    runs_target: bool = False
    cascades: bool = False
    num_slots: int = 16


class Finding(NamedTuple):
    name: str
    # one sentence; empty: as the reference
    problem: str

    @property
    def advice(self) -> str:
        return " Draft without trees: leave out tree, or lookahead." if self.name.startswith("trees") else ""


class _Case(NamedTuple):
    operation: Callable[..., Any]  # operation(*arguments, implementation=...) returns tensors [rows, ...]
    arguments: tuple[Any, ...]
    num_near_ties: int = 0  # rows that may differ
    tolerance: float = 0.0
    compares: bool = True  # whether a wrong result may change a token


def check_device(device: torch.device, shapes: Shapes, only: str | None = None) -> Iterator[Finding]:
    """Checks each operation that serving may need, or only the check with the name `only`. An exception in a check also
    counts as a problem."""
    for name, make_case in _checks(shapes):
        if only in (None, name):
            try:
                case = make_case()
                problem = "" if _num_different(case, device) <= case.num_near_ties else "differs from its reference"
            except Exception as error:
                problem = problem_of(error)
            yield Finding(name, problem)


def problem_of(error: Exception) -> str:
    return f"cannot run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _num_different(case: _Case, device: torch.device) -> int:
    actual = case.operation(*to_device(case.arguments, device), implementation="fused")
    if not case.compares:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 0
    expected = case.operation(*case.arguments, implementation="reference")
    pairs = [(actual, expected)] if isinstance(actual, torch.Tensor) else zip(actual, expected, strict=True)
    close = partial(torch.isclose, rtol=case.tolerance, atol=case.tolerance, equal_nan=True)
    different = [(~close(one.cpu(), other)).view(len(other), -1).any(1) for one, other in pairs]
    same_length = all(len(rows) == len(different[0]) for rows in different)
    return int(torch.stack(different).any(0).sum() if same_length else torch.cat(different).sum())


def _checks(shapes: Shapes) -> Iterator[tuple[str, Callable[[], _Case]]]:
    for dense in [False, True] if shapes.samples else [False]:
        for truncated in (False, True):
            name = "verification" + ", sampled drafts" * dense + ", truncated" * truncated
            yield name, partial(_verification, shapes, dense, truncated)
    yield "verification, in place", partial(_verification_in_place, shapes)
    yield "edits", partial(_edits, shapes)
    yield "rows", partial(_rows, shapes)
    if shapes.runs_target:
        yield "drafting", partial(_drafting, shapes)
    if shapes.samples:
        yield "noise", partial(_noise, shapes)
    if shapes.looks_up:
        yield "lookup", partial(_lookup, shapes)
    if shapes.looks_up or shapes.trims or shapes.cascades:  # drafts are rated
        yield "acceptance", partial(_acceptance, shapes)
    if shapes.trims:
        yield "budget", partial(_budget, shapes)
    if shapes.heads is not None:
        yield "trees, attention", partial(_attention, shapes, shapes.heads)
        yield "trees, paths", lambda: _Case(walk, make_walks(50, shapes.max_num_draft + 1))
        yield "trees, moves", partial(_moves, shapes, shapes.heads)
    if shapes.heads is not None and shapes.samples:
        yield "trees, rounds", partial(_rounds, shapes)


def _batch(shapes: Shapes, num_long_rows: int, short: list[int], dense: bool = False, truncated: bool = False) -> Batch:
    """Makes requests of max_num_draft tokens with `num_long_rows` in all, and requests of these lengths. The reference
    takes 0.4 ms on a core for a row of 128 k tokens."""
    num_draft = [shapes.max_num_draft] * max(1, num_long_rows // (shapes.max_num_draft + 1)) + short
    sampling: dict[str, list[Any]] = {"temperature": [0.4, 2.0, 1.0, 0.7, 0.0]}
    if truncated:  # limits alone and together
        sampling |= {"top_k": [0, 2, 0, 1, 9, 0, 0], "top_p": [0.3, 1.0, 0.5, 1.0], "min_p": [0.0, 0.4, 0.0]}
    states = torch.arange(2 * len(num_draft))
    types = {"top_k": torch.int32}
    parameters = {
        name: torch.tensor(values, dtype=types.get(name))[states % len(values)] for name, values in sampling.items()
    }
    how: dict[str, Any] = {"dense": dense, "dtype": shapes.dtype, "agreement": 0.9, "peaks": True}
    return make_batch(num_draft, shapes.vocab_size, **how, **parameters)


def _verification(shapes: Shapes, dense: bool, truncated: bool) -> _Case:
    short = [2, 2, 2, 1] * 6 if dense else [1, 0, 0, 0] * 9
    return _Case(rejection_sample, _batch(shapes, 12, short, dense, truncated), num_near_ties=1)


def _verification_in_place(shapes: Shapes) -> _Case:
    step = as_step(_batch(shapes, 12, [1, 0, 0, 0] * 9, truncated=True), prompts=4)
    return _Case(sample_step, step, num_near_ties=1)


def _edits(shapes: Shapes) -> _Case:
    batch = _batch(shapes, 18, [1, 0] * 3)
    edits = make_edits(batch)
    assert edits.bad_words is not None
    history = edits.bad_words.history.flatten()  # drafts continue bad words
    drafts = history[torch.arange(len(batch.draft_token_ids)) % len(history)]

    def operation(*given: Any, implementation: str) -> list[torch.Tensor]:
        edit: Any = adjust
        edited = [edit(*given, implementation)]
        if shapes.runs_target:  # it drafts after a request's last row
            rows = given[0][given[1][1:].long() - 1]
            edited.append(edit(rows, *given[1:], implementation, only_last=True))
        return edited

    arguments = *batch._replace(draft_token_ids=drafts)[:5], edits, batch.max_num_draft
    return _Case(operation, arguments, tolerance=_TOLERANCE)


def _rows(shapes: Shapes) -> _Case:
    def operation(rows: Any, lengths: Any, *others: Any, implementation: str) -> list[torch.Tensor]:
        limits, step_limit, num_draft, staged, first, second = others
        mapping, width, results = torch.zeros_like(num_draft), shapes.max_num_draft, list[torch.Tensor]()
        variants = (staged, staged._replace(confirmed=None)) if shapes.cascades else (None,)
        for stages in variants:
            totals, of_stages = inputs.new_totals(len(lengths), width, num_draft.device), (2, 1) if stages else ()
            slots, wanted, by_stage = limit(rows, lengths, limits, step_limit, mapping, of_stages, implementation)
            tally(totals, rows, wanted, num_draft, width, stages, implementation)
            results += [slots, wanted, mapping, *totals[:2], *by_stage]
        for tables in ((), (lengths.int(), lengths.float(), lengths.float())) if shapes.runs_target else ():
            states = lengths.float(), lengths.long(), *tables
            results += newest(mapping, lengths, lengths.long(), states, implementation)
        for confidence in (second[2], None) if shapes.cascades else ():
            for continues in (True, False):
                results += join(first, (*second[:2], confidence), continues, implementation)
        return results

    step, chains = (make(40, shapes.max_num_draft) for make in (inputs.make_step, inputs.make_chains))
    return _Case(operation, (*step, *chains))


def _drafting(shapes: Shapes) -> _Case:
    def operation(logits: Any, positions: Any, sampling: Any, implementation: str) -> None:
        coupled_sample(logits, positions, sampling, implementation)
        for greedy in (True, False):
            rated_sample(logits, positions, sampling, greedy, implementation)

    return _Case(operation, _drafted(shapes), compares=False)


def _drafted(shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor, Sampling]:
    batch = _batch(shapes, 0, [0] * 16, truncated=True)
    states = batch.idx_mapping.repeat_interleave(batch.cu_num_logits.diff())
    return batch.target_logits, batch.positions, batch.sampling.at(states)


def _noise(shapes: Shapes) -> _Case:
    logits, positions, sampling = _drafted(shapes)
    sampling = replace(sampling, temperature=sampling.temperature.clamp(min=0.4))  # at 0 there is no q
    return _Case(sample_with_q, (logits, positions, sampling), num_near_ties=1)


def _rounds(shapes: Shapes) -> _Case:
    batch = _batch(shapes, 0, [1] * 16, dense=True, truncated=True)
    states, rows = batch.idx_mapping, batch.cu_num_logits[:-1].long()
    assert batch.draft_logits is not None
    q_logits, positions, sampling = batch.draft_logits[states, 0], batch.positions[rows], batch.sampling.at(states)
    siblings = draw_siblings(q_logits, batch.draft_token_ids[rows + 1], positions, sampling, 4)
    return _Case(try_siblings, (batch.target_logits[rows], q_logits, siblings, positions, sampling), num_near_ties=1)


def _lookup(shapes: Shapes) -> _Case:
    return _Case(history_match, inputs.make_lookup(shapes.max_num_draft), compares=False)


def _acceptance(shapes: Shapes) -> _Case:
    num_stages, num_slots = 1 + shapes.cascades, 41

    def operation(*steps: Any, implementation: str) -> None:
        there = steps[0][0].device
        state = new_state(num_stages, num_slots, shapes.max_num_draft, there)
        for slots, drafts, sampled, rejected in steps:
            accept_probs = torch.zeros_like(drafts.confidence)
            tables = tuple(torch.zeros(2, num_slots, shapes.max_num_draft, device=there))
            reports = torch.zeros(num_slots, 2, device=there)
            others = [Other(1, shapes.max_num_draft, continues, (slots % 3).int()) for continues in (True, False)]
            for other, table in product((*others, None), (reports, None)) if num_stages > 1 else ():
                worth(state, slots, drafts, other, table, implementation)
            for keeps, written in ((False, ()), (True, tables), (True, ())):
                predict(state, slots, drafts, accept_probs, implementation, keeps, written)
            observe(state, slots, sampled, rejected, implementation)

    return _Case(operation, tuple(inputs.make_outcomes(4, 20, num_stages, shapes.max_num_draft)), compares=False)


def _budget(shapes: Shapes) -> _Case:
    def operation(*steps: Any, implementation: str) -> list[torch.Tensor]:
        bounds, device = (2, len(steps[0][0]) + 1), steps[0][0].device
        layouts = [Layout(*torch.full(bounds, -1, dtype=torch.int32, device=device)) for _ in steps]
        for layout, (accept_probs, slots, num_tokens, budget) in zip(layouts, steps, strict=True):
            share_budget(layout, accept_probs, slots, num_tokens, budget, 1, implementation)
        return [part for layout in layouts for part in layout]

    num_slots = shapes.num_slots
    sizes = (num_rows for num_rows in (min(12, num_slots), 33, 257) if num_rows <= num_slots)  # of each variant
    steps = (inputs.make_budgets(num_rows, shapes.max_num_draft, num_slots) for num_rows in sizes)
    return _Case(operation, tuple(chain(*steps)))


def _attention(shapes: Shapes, heads: tuple[int, int, int]) -> _Case:
    def operation(zeros: Any, query: Any, cache: Any, mask: Any, scale: float, implementation: str) -> torch.Tensor:
        attend(out := zeros.clone(), query, cache, mask, scale, implementation)
        return out

    width = shapes.max_num_draft + 1
    arguments = make_attention([(5, 40), (100, width), (2, width), (31, 1)], heads, width, shapes.dtype)
    return _Case(operation, arguments, tolerance=2e-2)  # of a dtype with 8 bits


def _moves(shapes: Shapes, heads: tuple[int, int, int]) -> _Case:
    def operation(caches: Any, moves: Any, implementation: str) -> list[torch.Tensor]:
        move: Any = compact
        moved = [cache.clone() for cache in caches]
        pointers = torch.tensor([cache.data_ptr() for cache in moved], dtype=torch.uint64, device=moved[0].device)
        move(moved, pointers, *moves, implementation)
        return moved

    _, num_kv_heads, head_size = heads
    caches, moves = make_moves([[0, 2, 3], [0, 1, 3], [0], [0, 3]], shapes.dtype, (num_kv_heads, 2 * head_size))
    return _Case(operation, (tuple(caches), moves))
