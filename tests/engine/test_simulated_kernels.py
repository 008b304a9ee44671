"""Kernels of vLLM that the simulated device has in NumPy do what they do in Triton."""

from typing import Any

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from simulated_device.vllm_kernels import in_numpy
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.spec_decode import acceptance_estimator

ENABLED = {"both groups": [True, True], "one of them": [False, True]}
LENGTHS = torch.tensor([1, 7, 0, 3, 5])
STARTS = torch.cat([torch.zeros(1, dtype=torch.int32), LENGTHS.cumsum(0).int()])
STATES = torch.tensor([4, 0, 2, 3, 5], dtype=torch.int32)  # of 6


def ints(*shape: int, most: int = 99, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(1, most, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_same(kernel: Any, grid: tuple[int, ...], make: Any, close: bool = False, **named: Any) -> list[torch.Tensor]:
    """What both forms of a kernel leave in the tensors of `make()`, which makes the arguments, and perhaps others."""
    assert in_numpy(kernel) is not None
    left = []
    for run in (kernel, InterpretedFunction(kernel.fn)):
        arguments, *others = made if isinstance(made := make(), tuple) else (made,)
        run[grid](*arguments, **named)
        left.append([each for each in (*arguments, *others) if isinstance(each, torch.Tensor)])
    for each, same in zip(*left, strict=True):
        assert (
            each.dtype == torch.uint64 or torch.equal(each, same) or (close and torch.allclose(each, same, rtol=1e-5))
        )
    return left[0]


@pytest.mark.parametrize("enabled", ENABLED)
def test_slot_mappings(enabled: str) -> None:
    """Ragged requests of two groups, with one of no tokens and one that is nobody's. Fails if a row of another request
    or group is read, another size of blocks taken, or what lies behind the tokens is left as it was."""
    tables, states = [ints(6, 5 + group, seed=group) for group in range(2)], STATES.clone()
    states[3] = -1

    def make() -> list[Any]:
        slots = torch.full((2, 24), 7_000, dtype=torch.int64)
        pointers = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
        return [
            24, states, STARTS, ints(24, most=20, dtype=torch.int64), pointers, torch.tensor([5, 6]),
            torch.tensor([4, 16], dtype=torch.int32), torch.tensor(ENABLED[enabled]), torch.zeros(2, dtype=torch.bool),
            slots, slots.stride(0), 0,
        ]  # fmt: skip

    constants = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 8}
    slots = assert_same(block_table._compute_slot_mappings_kernel, (2, 6), make, **constants)[-1]
    assert (slots[:, 16:] == -1).all() and (slots[1, :8] > 0).all() and (slots[:, 8:11] == -1).all()


def test_block_tables() -> None:
    """Fails if another request's blocks are taken, more of them than it has, or padding keeps its own."""
    tables = [ints(6, 5 + group, seed=group) for group in range(2)]
    num_blocks = ints(2, 6, most=5)

    def make() -> Any:
        taken = [torch.full((8, 5 + group), -5, dtype=torch.int32) for group in range(2)]
        pointers = [torch.tensor([each.data_ptr() for each in of], dtype=torch.uint64) for of in (tables, taken)]
        return [STATES, *pointers, torch.tensor([5, 6]), num_blocks, num_blocks.stride(0), 5], *taken

    *_, taken = assert_same(block_table._gather_block_tables_kernel, (2, 8), make, BLOCK_SIZE=4)
    assert (taken[5:] == 0).all() and (taken[:5] == -5).any() and (taken[:5] > 0).any()


@pytest.mark.parametrize("several", [False, True])
def test_writes(several: bool) -> None:
    """Fails if a write begins at another row or place, or in another group's table."""
    cu_lens = LENGTHS.cumsum(0).int()

    def make() -> Any:
        tables = [torch.zeros(6, 12 + group, dtype=torch.int32) for group in range(2)]
        pointers = torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)
        to = (pointers, torch.tensor([12, 13])) if several else (tables[0], 12)
        groups = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32) if several else None
        return [*to, STATES, ints(5, most=5), ints(16), cu_lens, groups], *tables

    *_, table = assert_same(buffer_utils._apply_write_kernel, (5,), make, BLOCK_SIZE=4, MULTI_GROUP=several)
    assert table.any() == several


def test_positions() -> None:
    def make() -> list[Any]:
        return [torch.zeros(20, dtype=torch.int64), torch.full((8,), 3, dtype=torch.int32), STATES, STARTS, ints(6), 8]

    _, seq_lens, *_ = assert_same(input_batch._prepare_pos_seq_lens_kernel, (6,), make, BLOCK_SIZE=4)
    assert (seq_lens[5:] == 0).all() and (seq_lens[:5] > 0).all()


@pytest.mark.parametrize("num_new", [0, 1])
def test_tokens_of_a_step(num_new: int) -> None:
    """Requests within their prompt, at its end and behind it. Fails if a token of a prompt is replaced, or a row takes
    another request's drafts."""
    num_logits = torch.tensor([1, 5, 0, 3, 2])
    cu_num_logits = torch.cat([torch.zeros(1, dtype=torch.int32), num_logits.cumsum(0).int()])
    seq_lens, prefill_lens = torch.tensor([20] * 5, dtype=torch.int32), torch.tensor([3, 18, 9, 20, 19, 12]).int()

    def make() -> list[Any]:
        drafts = ints(6, 7, dtype=torch.int64)
        return [
            torch.zeros(16, dtype=torch.int32), STATES, ints(6, seed=1, dtype=torch.int64), STARTS, seq_lens,
            prefill_lens, drafts, drafts.stride(0), cu_num_logits, torch.zeros(11, dtype=torch.int64),
        ]  # fmt: skip

    kernel, constants = input_batch._combine_sampled_and_draft_tokens_kernel, {"NUM_NEW_SAMPLED_TOKENS": num_new}
    input_ids, *_ = assert_same(kernel, (5,), make, BLOCK_SIZE=8, **constants)
    assert 0 < input_ids.count_nonzero() < 11


@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("has_queries", [False, True])
def test_end_of_a_step(has_counts: bool, has_queries: bool) -> None:
    """With a row that is nobody's, one that sampled nothing and one that sampled a token twice. Fails if a token is
    counted once, a length is another request's, or rejected tokens count as computed."""
    states, num_sampled = torch.tensor([4, -1, 2, 3, 5]).int(), torch.tensor([1, 2, 0, 4, 2]).int()

    def make() -> list[Any]:
        sampled, tokens = ints(5, 4, most=6, dtype=torch.int64), torch.zeros(6, 40, dtype=torch.int32)
        counts = torch.zeros(6, 8, dtype=torch.int32) if has_counts else None
        return [
            states, ints(6, most=20), torch.zeros(6, 1, dtype=torch.int64), counts, 8, sampled, 4, num_sampled,
            torch.tensor([0, 1, 0, 2, 3]).int(), STARTS if has_queries else None, tokens, 40, ints(6, most=20, seed=2),
        ]  # fmt: skip

    assert_same(input_batch._post_update_kernel, (5,), make)


def test_rows_of_requests() -> None:
    def make() -> list[Any]:
        return [STATES, torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), STARTS]

    assert_same(input_batch._expand_idx_mapping_kernel, (5,), make, BLOCK_SIZE=8)


@pytest.mark.parametrize("is_block", [False, True])
def test_chances_of_drafts(is_block: bool) -> None:
    """By a drafter's logits, some of them at temperature 0, some of which no token is possible in a block, and some of
    one token alone. Fails if padding is written, if a row takes another request's temperature or place, or if the most
    likely token counts twice."""
    num_rows, vocab_size, slots = 8, 300, torch.tensor([4, 0, 2, -1, 3, 5, 1, 6])
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 128:256], logits[2, 1:] = -torch.inf, -torch.inf
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.0, 1.0, 0.0, 0.7, 1.0])
    blocks = [torch.full((num_rows, 4), -7.0), torch.full((num_rows, 4), -7.0)]

    def make() -> list[Any]:
        own = [blocks[0].clone(), 4, blocks[1].clone(), 4]
        return [*own, logits, logits.stride(0), slots, 1, temperatures, num_rows - 1, vocab_size]

    kernel, constants = acceptance_estimator._local_max_sumexp_kernel, {"BLOCK_SIZE": 128}
    most, sums = assert_same(kernel, (num_rows, 3), make, close=True, **constants)[:2]
    assert (most[3, :3] == -torch.inf).all() and (most[-1] == -7).all() and sums[1, 1] == 0

    def chances() -> list[Any]:
        own = [value for _ in range(3) for value in (torch.zeros(8, 2), 2)]
        step = torch.arange(num_rows) % 2 if is_block else torch.tensor(1)
        return [*own, torch.tensor([0.7]), torch.tensor([0.1, -0.4]), most, 4, sums, 4, slots, 1, step, num_rows - 1, 3]

    constants = {"NUM_SPECULATIVE_STEPS": 2, "MAX_LOG_ODDS": 16.0, "PADDED_VOCAB_NUM_BLOCKS": 4}
    kernel = acceptance_estimator._predict_kernel
    features, *_ = assert_same(kernel, (num_rows,), chances, close=True, per_token_step=is_block, **constants)
    assert features[2].max() == 16 and 0 < features.count_nonzero() <= num_rows - 2
