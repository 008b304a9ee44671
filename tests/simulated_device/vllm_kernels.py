"""vLLM's kernels of each step in NumPy: through the interpreter they take half of a step.

A function has the arguments of its kernel, and reads a tensor as the kernel does, as the memory from an address on. A
kernel of another vLLM with other arguments runs through the interpreter.
"""

import ctypes
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

Grid = tuple[int, ...]


@cache
def in_numpy(kernel: Any) -> Callable[..., None] | None:
    """The function that does what a kernel of vLLM does, if there is one: it takes the grid and the arguments."""
    name, names = kernel.fn.__name__, [*inspect.signature(kernel.fn).parameters]
    function = globals().get(name.removesuffix("_kernel")) if kernel.fn.__module__.startswith("vllm.") else None
    if function is None or getattr(sys.modules[kernel.fn.__module__], name) is not kernel:
        return None
    if [*inspect.signature(function).parameters][1:] != names:
        return None
    defaults = {name: it.default for name, it in inspect.signature(kernel.fn).parameters.items()}

    def run(grid: Grid, *args: Any, **named: Any) -> None:
        given = {**defaults, **dict(zip(names, args, strict=False)), **named}
        function(grid, *(_memory(given[name]) for name in names))

    return run


def _memory(value: Any) -> Any:
    """The elements of a tensor's memory from its first one on."""
    if not isinstance(value, torch.Tensor):
        return value
    start = value.storage_offset()
    return value.as_strided((value.untyped_storage().nbytes() // value.element_size() - start,), (1,)).numpy()


def _row(address: int, row: int, length: int) -> Any:
    """A row of an array of int32 in memory."""
    return np.ctypeslib.as_array((ctypes.c_int32 * length).from_address(int(address) + 4 * int(row) * int(length)))


def _compute_slot_mappings(
    grid: Grid, max_num_tokens: int, idx_mapping: Any, query_start_loc: Any, pos: Any, block_table_ptrs: Any,
    block_table_strides: Any, block_sizes: Any, slot_mapping_enabled: Any, dcp_sharded: Any, slot_mappings_ptr: Any,
    slot_mappings_stride: int, cp_rank: int, CP_SIZE: int, CP_INTERLEAVE: int, PAD_ID: int, TRITON_BLOCK_SIZE: int,
) -> None:  # fmt: skip
    assert CP_SIZE == 1, "contexts of several ranks are not simulated"
    num_groups, num_reqs = grid[0], grid[1] - 1
    for group in range(num_groups):
        slots = slot_mappings_ptr[group * slot_mappings_stride :]
        slots[query_start_loc[num_reqs] : max_num_tokens] = PAD_ID
        size = block_sizes[group]
        for request in range(num_reqs):
            state, tokens = idx_mapping[request], slice(query_start_loc[request], query_start_loc[request + 1])
            if state < 0 or not slot_mapping_enabled[group]:
                slots[tokens] = PAD_ID
                continue
            blocks, positions = _row(block_table_ptrs[group], state, block_table_strides[group]), pos[tokens]
            slots[tokens] = blocks[positions // size].astype(np.int64) * size + positions % size


def _gather_block_tables(
    grid: Grid, batch_idx_to_req_idx: Any, src_block_table_ptrs: Any, dst_block_table_ptrs: Any,
    block_table_strides: Any, num_blocks_ptr: Any, num_blocks_stride: int, num_reqs: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    for group in range(grid[0]):
        stride = block_table_strides[group]
        for row in range(grid[1]):
            taken = _row(dst_block_table_ptrs[group], row, stride)
            if row >= num_reqs:
                taken[:] = 0
                continue
            request = batch_idx_to_req_idx[row]
            num = num_blocks_ptr[group * num_blocks_stride + request]
            taken[:num] = _row(src_block_table_ptrs[group], request, stride)[:num]


def _apply_write(
    grid: Grid, output_ptr: Any, output_stride: Any, write_indices_ptr: Any, write_starts_ptr: Any,
    write_contents_ptr: Any, write_cu_lens_ptr: Any, write_group_ids_ptr: Any, BLOCK_SIZE: int, MULTI_GROUP: bool,
) -> None:  # fmt: skip
    begin = 0
    for place in range(grid[0]):
        end, row, start = write_cu_lens_ptr[place], write_indices_ptr[place], write_starts_ptr[place]
        if MULTI_GROUP:
            group = write_group_ids_ptr[place]
            _row(output_ptr[group], row, output_stride[group])[start : start + end - begin] = write_contents_ptr[
                begin:end
            ]
        else:
            first = int(row) * output_stride + int(start)
            output_ptr[first : first + end - begin] = write_contents_ptr[begin:end]
        begin = end


def _prepare_pos_seq_lens(
    grid: Grid, pos_ptr: Any, seq_lens_ptr: Any, idx_mapping_ptr: Any, query_start_loc_ptr: Any,
    num_computed_tokens_ptr: Any, max_num_reqs: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    num_reqs = grid[0] - 1
    seq_lens_ptr[num_reqs:max_num_reqs] = 0
    for row in range(num_reqs):
        computed, start = num_computed_tokens_ptr[idx_mapping_ptr[row]], query_start_loc_ptr[row]
        length = query_start_loc_ptr[row + 1] - start
        seq_lens_ptr[row] = computed + length
        pos_ptr[start : start + length] = np.arange(computed, computed + length)


def _combine_sampled_and_draft_tokens(
    grid: Grid, input_ids_ptr: Any, idx_mapping_ptr: Any, last_sampled_tokens_ptr: Any, query_start_loc_ptr: Any,
    seq_lens_ptr: Any, prefill_len_ptr: Any, draft_tokens_ptr: Any, draft_tokens_stride: int, cu_num_logits_ptr: Any,
    logits_indices_ptr: Any, BLOCK_SIZE: int, NUM_NEW_SAMPLED_TOKENS: int,
) -> None:  # fmt: skip
    for row in range(grid[0]):
        state, start, end = idx_mapping_ptr[row], cu_num_logits_ptr[row], query_start_loc_ptr[row + 1]
        num_logits = cu_num_logits_ptr[row + 1] - start
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        logits_indices_ptr[start : start + num_logits] = np.arange(end - num_logits, end)
        prefill_len = prefill_len_ptr[state]
        if seq_lens_ptr[row] <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_lens_ptr[row] - num_logits >= prefill_len:
            input_ids_ptr[end - num_logits] = last_sampled_tokens_ptr[state]
        if num_drafts > 0:
            first = int(state) * draft_tokens_stride
            input_ids_ptr[end - num_drafts : end] = draft_tokens_ptr[first : first + num_drafts]


def _post_update(
    grid: Grid, idx_mapping_ptr: Any, num_computed_tokens_ptr: Any, last_sampled_tokens_ptr: Any,
    output_bin_counts_ptr: Any, output_bin_counts_stride: int, sampled_tokens_ptr: Any, sampled_tokens_stride: int,
    num_sampled_ptr: Any, num_rejected_ptr: Any, query_start_loc_ptr: Any, all_token_ids_ptr: Any,
    all_token_ids_stride: int, total_len_ptr: Any,
) -> None:  # fmt: skip
    for row in range(grid[0]):
        state, num_sampled = int(idx_mapping_ptr[row]), num_sampled_ptr[row]
        if state < 0:
            continue
        if num_sampled > 0:
            tokens = sampled_tokens_ptr[row * sampled_tokens_stride :][:num_sampled]
            last_sampled_tokens_ptr[state] = tokens[-1]
            all_token_ids_ptr[state * all_token_ids_stride + total_len_ptr[state] :][:num_sampled] = tokens
            total_len_ptr[state] += num_sampled
            if output_bin_counts_ptr is not None:
                np.add.at(output_bin_counts_ptr, state * output_bin_counts_stride + tokens, 1)
        length = 0 if query_start_loc_ptr is None else query_start_loc_ptr[row + 1] - query_start_loc_ptr[row]
        num_computed_tokens_ptr[state] += length - num_rejected_ptr[row]


def _expand_idx_mapping(
    grid: Grid, idx_mapping_ptr: Any, expanded_idx_mapping_ptr: Any, expanded_local_pos_ptr: Any,
    cu_num_logits_ptr: Any, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    for row in range(grid[0]):
        begin, end = cu_num_logits_ptr[row], cu_num_logits_ptr[row + 1]
        expanded_idx_mapping_ptr[begin:end] = idx_mapping_ptr[row]
        expanded_local_pos_ptr[begin:end] = np.arange(end - begin)


def _local_max_sumexp(
    grid: Grid, local_max_ptr: Any, local_max_stride: int, local_sumexp_ptr: Any, local_sumexp_stride: int,
    logits_ptr: Any, logits_stride: int, idx_mapping_ptr: Any, idx_mapping_stride: int, temperature_ptr: Any,
    num_tokens: int, vocab_size: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    for row in range(min(grid[0], num_tokens)):
        state, logits = idx_mapping_ptr[row * idx_mapping_stride], logits_ptr[row * logits_stride :][:vocab_size]
        for block in range(grid[1]):
            most, total = -np.inf, 0.0
            if state >= 0:
                scaled = logits[block * BLOCK_SIZE :][:BLOCK_SIZE] / (temperature_ptr[state] or np.float32(1))
                most = scaled.max()
                total = np.exp(scaled - most).sum() if most > -np.inf else 0.0
            local_max_ptr[row * local_max_stride + block] = most
            local_sumexp_ptr[row * local_sumexp_stride + block] = total


def _predict(
    grid: Grid, features_ptr: Any, features_stride: int, pred_ptr: Any, pred_stride: int, conf_ptr: Any,
    conf_stride: int, slope_ptr: Any, intercepts_ptr: Any, local_max_ptr: Any, local_max_stride: int,
    local_sumexp_ptr: Any, local_sumexp_stride: int, idx_mapping_ptr: Any, idx_mapping_stride: int, step_ptr: Any,
    num_tokens: int, vocab_num_blocks: int, per_token_step: bool, NUM_SPECULATIVE_STEPS: int, MAX_LOG_ODDS: float,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:  # fmt: skip
    for row in range(min(grid[0], num_tokens)):
        state = int(idx_mapping_ptr[row * idx_mapping_stride])
        if state < 0:
            continue
        step = int(step_ptr[row if per_token_step else 0])
        request = row // NUM_SPECULATIVE_STEPS if per_token_step else row
        maxes = local_max_ptr[row * local_max_stride :][:vocab_num_blocks]
        with np.errstate(divide="ignore", invalid="ignore"):
            total = (
                local_sumexp_ptr[row * local_sumexp_stride :][:vocab_num_blocks] * np.exp(maxes - maxes.max())
            ).sum()
            feature = np.clip(-np.log(np.maximum(total - 1, 0)), -MAX_LOG_ODDS, MAX_LOG_ODDS)
        prob = 1 / (1 + np.exp(-(slope_ptr[0] * feature + intercepts_ptr[step])))
        features_ptr[state * features_stride + step] = feature
        pred_ptr[state * pred_stride + step] = conf_ptr[request * conf_stride + step] = prob
