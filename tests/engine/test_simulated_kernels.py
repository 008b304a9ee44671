"""Kernels of vLLM that the simulated device has in NumPy do what they do in Triton."""

import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel as kernel

ENABLED = {"both groups": [True, True], "one of them": [False, True]}


@pytest.mark.parametrize("enabled", ENABLED)
def test_slot_mappings(enabled: str) -> None:
    """Ragged requests of two groups, with one of no tokens and one that is nobody's. Fails if a row of another request
    or group is read, another size of blocks taken, or what lies behind the tokens is left as it was."""
    rng = torch.Generator().manual_seed(0)
    tables = [torch.randint(1, 99, (6, 5 + group), generator=rng, dtype=torch.int32) for group in range(2)]
    lengths = torch.tensor([1, 7, 0, 3, 5])
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    found = []
    for run in (kernel, InterpretedFunction(kernel.fn)):
        slots = torch.full((2, 24), 7_000, dtype=torch.int64)
        run[(2, len(lengths) + 1)](
            slots.shape[1],
            torch.tensor([4, 0, 2, -1, 5], dtype=torch.int32),
            starts,
            torch.randint(0, 20, (24,), generator=rng.manual_seed(1)),
            torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64),
            torch.tensor([table.stride(0) for table in tables]),
            torch.tensor([4, 16], dtype=torch.int32),
            torch.tensor(ENABLED[enabled]),
            torch.zeros(2, dtype=torch.bool),
            slots,
            slots.stride(0),
            0,
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=8,
        )
        found.append(slots)
    assert torch.equal(*found)
    assert (found[0][:, 16:] == -1).all() and (found[0][1, :8] > 0).all() and (found[0][:, 8:11] == -1).all()
