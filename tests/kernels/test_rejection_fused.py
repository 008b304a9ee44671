"""Compares verification in Triton with its reference: the same tokens, and the number of reads of the logits.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
"""

import math

import pytest
import torch
from batches import TRUNCATIONS, of_states
from interpreted import DEVICE, INTERPRETED, assert_equals_reference, bytes_moved, needs_triton
from vllm_specplugins.kernels.rejection import rejection_sample, sample_step
from vllm_specplugins.kernels.rejection.arguments import Drafts, Result, layout_of, parameters_of, target_of
from vllm_specplugins.kernels.rejection.inputs import Batch, as_step, make_batch, to_device
from vllm_specplugins.kernels.rejection.truncation import thresholds

# Whether q is dense.
KINDS = {"one-hot": False, "dense": True}


ROWS = "target_logits", "draft_token_ids", "positions"


def assert_same(kind: str, batch: Batch, num_near_ties: int = 0) -> None:
    """Request by request; a near tie (arrivals closer than float32 can tell) may go either way."""
    sampled, num_sampled = rejection_sample(*batch, implementation="reference")
    ours, num_ours = rejection_sample(*to_device(batch, DEVICE), implementation="fused")
    assert ours.dtype == torch.int64 and num_ours.dtype == torch.int32
    same = (ours.cpu() == sampled).all(1) & (num_ours.cpu() == num_sampled)
    assert int((~same).sum()) <= num_near_ties, (sampled[~same], ours[~same.to(DEVICE)])


@needs_triton
@pytest.mark.parametrize(
    ("vocab_size", "truncation"),
    [(1, "all"), (5, "all"), *((300, name) for name in TRUNCATIONS), (9001, "whole"), (9001, "all")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference(kind: str, vocab_size: int, truncation: str) -> None:
    """Ragged, with requests of no draft. Kills: a mask off by one; a tie that goes elsewhere; a row of another step."""
    dtype = torch.bfloat16 if vocab_size % 2 else torch.float32
    drafts = [3, 0, 4, 1, 2] if vocab_size < 9000 else [2, 0, 1]
    parameters = of_states(truncation, 2 * len(drafts))
    assert_same(kind, make_batch(drafts, vocab_size, dense=KINDS[kind], dtype=dtype, **parameters))


@needs_triton
@pytest.mark.parametrize("truncation", ["whole", "all"])
@pytest.mark.parametrize("drafts", [[3, 0, 4, 1, 2], [0] * 5], ids=["drafts", "none"])
def test_step_equals_reference(drafts: list[int], truncation: str) -> None:
    """Where tokens stand, two of five in their prompts. Kills: a place of another row; a draft behind a prompt."""
    given = as_step(make_batch(drafts, 300, **of_states(truncation, 10)), prompts=2)
    assert_equals_reference(sample_step, *given)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncation", ["whole", "all"])
def test_strange_logits(truncation: str, kind: str) -> None:
    """-inf, NaN and +inf, whole rows of them, in float16. Kills: an id outside of the vocabulary; NaN that wins."""
    batch = make_batch([4] * 5, 300, dense=KINDS[kind], dtype=torch.float16, **of_states(truncation, 10))
    logits = batch.target_logits
    rng = torch.Generator().manual_seed(5)
    for value, share in ((-math.inf, 0.5), (math.nan, 0.3), (math.inf, 0.005)):
        logits[torch.rand(logits.shape, generator=rng) < share] = value
    logits[3], logits[11], logits[17] = -math.inf, math.nan, math.inf
    logits[22:25, 1:] = -math.inf
    assert_same(kind, batch)
    sampled, num_sampled = rejection_sample(*to_device(batch, DEVICE), implementation="fused")
    assert (num_sampled >= 1).all() and (sampled < 300).all() and (sampled[:, 0] >= 0).all()


FLAT = {
    "top_k": {"top_k": torch.tensor([4000, 20, 0, 1000], dtype=torch.int32)},
    "top_p": {"top_p": torch.tensor([0.95, 0.6, 1.0, 0.9995])},
    "min_p": {"min_p": torch.tensor([0.05, 0.001, 0.0, 0.02])},
}
FLAT["all"] = FLAT["top_k"] | FLAT["top_p"] | FLAT["min_p"]


@needs_triton
@pytest.mark.parametrize("truncation", FLAT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flat_rows(dtype: torch.dtype, truncation: str) -> None:
    """Exact thresholds and weights where thousands of tokens share it: no group can be left out. Fails if a
    bound is above the threshold, a read leaves out a chunk or a group, or the search ends beside it.
    """
    from vllm_specplugins.kernels.rejection.accept_fused import weigh
    from vllm_specplugins.kernels.rejection.scan_fused import LOG2_E, scan

    batch = make_batch([1, 1], 9001, dense=True, dtype=dtype, temperature=torch.full((4,), 0.9), **FLAT[truncation])
    batch.target_logits[:] = batch.target_logits * 0.3 + torch.tensor([[0.0], [9.0], [0.0], [-9.0]])
    moved = to_device(batch, DEVICE)
    layout, target, logits_of_q = layout_of(*moved[1:5]), target_of(moved.target_logits), moved.draft_logits
    drafts = Drafts(logits_of_q, logits_of_q.stride(0), logits_of_q.stride(1), logits_of_q.shape[-1])
    parameters, given = parameters_of(moved.sampling, layout)
    scanned = scan(target, drafts, layout, parameters)
    result = Result(
        torch.empty(2, 2, dtype=torch.int64, device=DEVICE), torch.empty(2, dtype=torch.int32, device=DEVICE)
    )
    weighed = weigh(result, scanned, target, drafts, layout, parameters, given)
    limit, total = weighed.limit.flatten().cpu(), weighed.total.flatten().cpu()
    rows = batch.sampling.at(batch.idx_mapping.long().repeat_interleave(2))
    logits, scale = batch.target_logits.float(), LOG2_E.value / rows.temperature
    weights = torch.exp2((logits - logits.amax(-1, keepdim=True)) * scale[:, None])
    stays = logits >= thresholds(logits, scale, weights, rows.top_k, rows.top_p, rows.min_p)[:, None]
    assert int(stays.sum(-1).max()) > 500
    assert torch.equal(logits >= limit[:, None], stays)
    torch.testing.assert_close(total, (weights * stays).sum(-1), rtol=1e-5, atol=0.0)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_and_padded(kind: str) -> None:
    """Drafts of -1, a request without rows, a draft vocabulary that is narrower, a width beyond the drafts."""
    batch = make_batch([2, 3, 1], 300, dense=KINDS[kind], agreement=1.0)
    assert_same(kind, batch._replace(draft_token_ids=torch.full_like(batch.draft_token_ids, -1)))
    more = torch.cat([batch.cu_num_logits, batch.cu_num_logits[-1:]])
    states = torch.cat([batch.idx_mapping, batch.idx_mapping[:1]])
    assert_same(kind, batch._replace(cu_num_logits=more, idx_mapping=states))
    if batch.draft_logits is None:
        assert_same(kind, make_batch([1, 2], 300)._replace(max_num_draft=6))
    else:
        narrow = batch._replace(draft_logits=batch.draft_logits[:, :, :200])
        assert_same(kind, narrow._replace(draft_token_ids=batch.draft_token_ids.clamp(max=199)))


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_many_draws(kind: str) -> None:
    """Near ties are rare. Kills: noise of another stream or position; a race that is called off too early."""
    num_reqs = 1000 if DEVICE == "cuda" else 60
    assert_same(kind, make_batch([2] * num_reqs, 1500, dense=KINDS[kind], agreement=0.5), num_near_ties=1)


@pytest.mark.skipif(not INTERPRETED, reason="reorders the interpreter's loop")
@pytest.mark.parametrize("kind", KINDS)
def test_programs_in_any_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards, as here. Kills: a result that the program with the last index writes, not the last to come."""
    from triton.runtime.interpreter import InterpreterBuilder

    place = InterpreterBuilder.set_grid_idx

    def place_backwards(self, *index: int) -> None:
        place(self, *(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", place_backwards)
    for truncation in ("whole", "top_p"):
        parameters = of_states(truncation, 6) | {"temperature": torch.ones(6)}
        assert_same(kind, make_batch([2, 0, 1], 9001, dense=KINDS[kind], **parameters))


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_the_scan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are tiles of rows, though K is 31. Fails if some are launched for drafts that no step verifies,
    or if a row is taken for another request's, or one is that no request has."""
    from vllm_specplugins.kernels.rejection import scan_fused

    kernel, grids = scan_fused._scan_kernel, []
    launcher = type("", (), {"__getitem__": lambda _, grid: grids.append(grid) or kernel[grid]})()
    monkeypatch.setattr(scan_fused, "_scan_kernel", launcher)
    batch = make_batch([1, -1, 0, 3, -1], 9001, dense=KINDS[kind])
    batch = batch._replace(max_num_draft=31)
    if batch.draft_logits is not None:
        batch = batch._replace(draft_logits=torch.nn.functional.pad(batch.draft_logits, (0, 0, 0, 28), value=torch.nan))
    padded = {name: torch.cat((getattr(batch, name), getattr(batch, name)[:2])) for name in ROWS}
    ours = rejection_sample(*to_device(batch._replace(**padded), DEVICE), implementation="fused")
    for mine, theirs in zip(ours, rejection_sample(*batch, implementation="reference"), strict=True):
        assert torch.equal(mine.cpu(), theirs.to(mine.dtype))
    assert grids == [(2 * 9 * (2 if KINDS[kind] else 1),)]


@pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter")
@pytest.mark.parametrize(
    ("dense", "truncation", "counted", "limit"),
    [(False, {}, "all", 1.1), (True, {}, "all", 1.9), (False, {"top_p": 0.95}, "distinct", 1.3)],
    ids=["one-hot", "dense", "top_p"],
)
def test_bytes_moved(dense: bool, truncation: dict, counted: str, limit: float) -> None:
    """In reads of the target's logits, K = 4; all requests reject their first draft."""
    parameters = {name: torch.full((8,), value) for name, value in truncation.items()}
    batch = make_batch([4] * 4, 32_768, dense=dense, dtype=torch.bfloat16, agreement=0.0, **parameters)
    # Twenty tokens above the bulk, as a language model has them: their groups, 20 of 128 here, are read again.
    batch.target_logits[:, 100::1700] += 12
    batch.draft_token_ids.fill_(-1)
    with bytes_moved() as moved:
        rejection_sample(*batch, implementation="fused")
    shares = {name: count / (2 * batch.target_logits.numel()) for name, count in moved.items()}
    print(f"dense {dense}, {truncation}: {shares}")
    assert shares[counted] <= limit
