"""A step's budget of draft tokens: the reference beside vLLM's own arithmetic, the kernel beside the reference.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a process of its own.
"""

import pytest
import torch
from interpreted import DEVICE, RUNS, needs_triton
from vllm_specplugins.kernels.budget.testing import make_shares, shared

HOST, GPU = torch.device("cpu"), torch.device(DEVICE)
SIZES = [(1, 1, 1), (1, 5, 4), (12, 5, 16), (16, 16, 16), (97, 3, 100), (3, 31, 300)]


@needs_triton
@pytest.mark.parametrize(("num_rows", "width", "num_slots"), SIZES)
def test_equals_reference(num_rows: int, width: int, num_slots: int) -> None:
    """Fails if equals are not taken by row, a token behind a draft's end counts, a chance of 0 or 1 is left out, or a
    row of padding moves an end."""
    for share in make_shares(num_rows, width, num_slots):
        for ours, expected in zip(shared(share, "fused", GPU), shared(share, "reference", HOST), strict=True):
            assert torch.equal(ours, expected), share


@pytest.mark.skipif(RUNS, reason="once is enough")
@pytest.mark.parametrize(("num_rows", "width", "num_slots"), SIZES)
def test_as_vllm(num_rows: int, width: int, num_slots: int) -> None:
    """What is admitted is worth as much as what vLLM admits, and within the drafts. Fails if a chance stands for its
    token alone, or a row's chances are another slot's."""
    adaptive = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    for share in make_shares(num_rows, width, num_slots, seed=2):
        drafts, others = share.num_tokens
        theirs = drafts.clone()
        if share.budget < int(drafts.sum()):
            arguments = share.accept_probs, share.slots, theirs, share.budget, width
            adaptive._assign_draft_token_budget(*arguments)
        cu_num_logits, query_start_loc = shared(share, "reference", HOST)
        ours = cu_num_logits.diff()[:num_rows] - 1
        assert torch.equal(ours + others, query_start_loc.diff()[:num_rows]) and int(ours.sum()) == share.budget
        assert (ours <= drafts).all() and not query_start_loc[num_rows:].diff().any()
        survival = share.accept_probs[share.slots].cumprod(dim=1)
        worth = [sum(row[:count].sum() for row, count in zip(survival, own, strict=True)) for own in (ours, theirs)]
        torch.testing.assert_close(*worth)
