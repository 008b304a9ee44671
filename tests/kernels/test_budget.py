"""The budget of a step's draft tokens: compares the reference with vLLM's arithmetic, and the kernel with the
reference.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
"""

from typing import Any

import pytest
import torch
from interpreted import DEVICE, by_reference, needs_triton
from vllm_specplugins.kernels.budget import Layout, host, share_budget
from vllm_specplugins.kernels.inputs import make_budgets
from vllm_specplugins.kernels.rejection.inputs import to_device

SIZES = [(1, 1, 1), (1, 5, 4), (12, 5, 16), (16, 16, 16), (97, 3, 100), (3, 31, 300)]


def shared(step: tuple[Any, ...], implementation: str) -> list[torch.Tensor]:
    """Returns cu_num_logits and query_start_loc, with one token of each request in addition to its draft."""
    *tensors, budget = to_device(step, DEVICE if implementation == "fused" else "cpu")
    layout = Layout(*torch.full((2, len(tensors[0]) + 1), -1, dtype=torch.int32, device=tensors[0].device))
    share_budget(layout, *tensors, budget, 1, implementation)
    return [bounds.cpu() for bounds in layout]


@needs_triton
@pytest.mark.parametrize(("num_rows", "width", "num_slots"), SIZES)
def test_equals_reference(num_rows: int, width: int, num_slots: int) -> None:
    """Fails if equals are not taken by row, a token behind a draft's end counts, a chance of 0 or 1 is left out, or a
    row of padding moves an end."""
    for step in make_budgets(num_rows, width, num_slots):
        for ours, expected in zip(shared(step, "fused"), shared(step, "reference"), strict=True):
            assert torch.equal(ours, expected), step


@by_reference
@pytest.mark.parametrize(("num_rows", "width", "num_slots"), SIZES)
def test_on_the_host(num_rows: int, width: int, num_slots: int) -> None:
    """The loops that `replay` plays. Fails if equals are not taken by row, or a row's chances are another slot's."""
    for step in make_budgets(num_rows, width, num_slots):
        (accept_probs, slots, (drafts, _), budget), (bounds, _) = step, shared(step, "reference")
        counts = host.share_budget(accept_probs.numpy(), slots.long().numpy(), drafts.long().numpy(), budget)
        assert counts.tolist() == (bounds.diff()[:num_rows] - 1).tolist(), step


@by_reference
@pytest.mark.parametrize(("num_rows", "width", "num_slots"), SIZES)
def test_as_vllm(num_rows: int, width: int, num_slots: int) -> None:
    """The admitted tokens have the total score of the tokens that vLLM admits, and are within the drafts. Fails if a
    probability counts only for its token, or if a row uses the probabilities of another slot."""
    adaptive = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    for step in make_budgets(num_rows, width, num_slots):
        accept_probs, slots, (drafts, others), budget = step
        theirs = drafts.clone()
        if budget < int(drafts.sum()):
            adaptive._assign_draft_token_budget(accept_probs, slots, theirs, budget, width)
        cu_num_logits, query_start_loc = shared(step, "reference")
        ours = cu_num_logits.diff()[:num_rows] - 1
        assert torch.equal(ours + others, query_start_loc.diff()[:num_rows]) and int(ours.sum()) == budget
        assert (ours <= drafts).all() and not query_start_loc[num_rows:].diff().any()
        survival = accept_probs[slots].cumprod(dim=1)
        worth = [sum(row[:n].sum() for row, n in zip(survival, counts, strict=True)) for counts in (ours, theirs)]
        torch.testing.assert_close(*worth)
