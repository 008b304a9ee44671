"""Compares the rows of a step in Triton with their reference: the same integers.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
What is counted, beside the host's counts: tests/engine/test_tally.py.
"""

from typing import Any

import pytest
import torch
from interpreted import DEVICE, assert_equals_reference, needs_triton
from launch_keys import recorded
from vllm_specplugins.kernels.inputs import make_chains, make_step, new_totals
from vllm_specplugins.kernels.rejection.inputs import to_device
from vllm_specplugins.kernels.steps import join, limit, newest, tally


def run(
    step: tuple[Any, ...], max_num_draft: int, implementation: str, once: int = 1, has_stages: bool = True
) -> list[Any]:
    """All that is written."""
    device = DEVICE if implementation == "fused" else "cpu"
    rows, lengths, limits, step_limit, num_draft, staged = to_device(step, device)
    mapping, totals = torch.full_like(num_draft, 77), new_totals(len(lengths), max_num_draft, device, once)
    most_of_stages = (max_num_draft // 2, 1) if has_stages else ()
    slots, wanted, of_stages = limit(rows, lengths, limits, step_limit, mapping, most_of_stages, implementation)
    tally(totals, rows, wanted, num_draft, max_num_draft, staged if has_stages else None, implementation)
    tables = (lengths.float(), lengths.long(), lengths) if has_stages else ()
    read = newest(mapping, lengths, lengths.long() + 7, tables, implementation)
    return [actual.cpu() for actual in (slots, wanted, mapping, *totals[:2], *of_stages, *read)]


@needs_triton
@pytest.mark.parametrize(("num_rows", "max_num_draft"), [(1, 1), (3, 5), (9, 31), (70, 2), (300, 5)])
def test_equals_reference(num_rows: int, max_num_draft: int) -> None:
    """Over several programs. Fails if a row of padding, or of a prompt, wants or counts anything; if a limit, a place,
    a kind or a stage is another's; if a rehearsal counts; if a stage that is not allowed may draft, or more than its
    limit; if what drafting begins with is another slot's, or a row of padding has a text."""
    step = make_step(num_rows, max_num_draft)
    for options in ({}, {"has_stages": False}, {"once": 0}):
        actual, expected = (run(step, max_num_draft, name, **options) for name in ("fused", "reference"))
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert bool(expected[3].any()) == (options != {"once": 0}), "a rehearsal"
    if num_rows > 3:
        assert 0 < int((expected[1] > 0).sum()) < num_rows


@needs_triton
@pytest.mark.parametrize(("num_rows", "max_num_draft"), [(1, 1), (9, 31), (300, 5)])
@pytest.mark.parametrize("continues", [True, False])
def test_joined(num_rows: int, max_num_draft: int, continues: bool) -> None:
    """The results are equal to the last bit. Fails if a token has the place of another stage's token, the wrong stage,
    or another confidence."""
    first, second = make_chains(num_rows, max_num_draft)
    for chain in (second, (*second[:2], None)):
        expected = assert_equals_reference(join, first, chain, continues)
    if num_rows > 1:
        assert 0 < expected[2].sum() < expected[2].numel()


@needs_triton
def test_few_variants() -> None:
    """Fails if Triton compiles a kernel for each number of rows, or of steps."""
    with recorded("vllm_specplugins.kernels.steps") as keys:
        for num_rows in (1, 2, 16, 33):
            run(make_step(num_rows, 5), 5, "fused")
            first, (tokens, lengths, _) = make_chains(num_rows, 5)
            for depth in (1, 2, 4):
                join(first, (tokens[:, :depth].contiguous(), lengths, None), True, implementation="fused")
    assert len(keys) == 4, keys
