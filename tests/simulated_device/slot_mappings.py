"""vLLM's kernel of slot mappings in NumPy: through the interpreter it takes a third of a step with drafts."""

import ctypes
from typing import Any

import numpy as np


def compute_slot_mappings(grid: tuple[int, int], **arguments: Any) -> None:
    """`_compute_slot_mappings_kernel` with its own arguments: a row of slots for each KV-cache group."""
    given = {name: value.numpy() if hasattr(value, "numpy") else value for name, value in arguments.items()}
    assert given["CP_SIZE"] == 1, "contexts of several ranks are not simulated"
    num_groups, num_reqs = grid[0], grid[1] - 1
    starts, slots, no_slot = given["query_start_loc"], given["slot_mappings_ptr"], given["PAD_ID"]
    for group in range(num_groups):
        slots[group, starts[num_reqs] : given["max_num_tokens"]] = no_slot
        size = given["block_sizes"][group]
        for request in range(num_reqs):
            state, tokens = int(given["idx_mapping"][request]), slice(starts[request], starts[request + 1])
            if state < 0 or not given["slot_mapping_enabled"][group]:
                slots[group, tokens] = no_slot
                continue
            stride = int(given["block_table_strides"][group])
            blocks = _row(int(given["block_table_ptrs"][group]), state, stride)
            positions = given["pos"][tokens]
            slots[group, tokens] = blocks[positions // size].astype(np.int64) * size + positions % size


def _row(address: int, row: int, length: int) -> Any:
    """A row of an array of int32 in memory."""
    return np.ctypeslib.as_array((ctypes.c_int32 * length).from_address(address + 4 * row * length))
