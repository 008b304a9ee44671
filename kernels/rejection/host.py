"""Verification of one-hot drafts on a CPU: the tokens of reference.py, bit for bit. Operations on whole rows are those
of the reference. Its other 150 operations are small, but together they take longer than a small step of vLLM, so here
they are compiled loops. PyTorch computes the logarithms, since another library would round them differently."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..compiled import compiled, inlined
from . import Layout, Sampling, noise
from .noise import GROUP, STREAM_SHIFT, TOKEN
from .reference import GROUP_SIZE, chunks, finite_with_max, group_sums, weigh, weights

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

STEP, FIRST, SECOND = np.uint64(noise.STEP), np.uint64(noise.FIRST), np.uint64(noise.SECOND)
HALF, UNIT, LARGEST = np.float32(0.5), np.float32(2.0**-32), np.float32(1 - 2.0**-24)
ONE, LOG2_E, NEVER = np.float32(1), np.float32(math.log2(math.e)), np.float32(-math.inf)


@inlined
def _splitmix64(state: np.uint64) -> np.uint64:
    bits = state + STEP
    bits = (bits ^ (bits >> np.uint64(30))) * FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * SECOND
    return bits ^ (bits >> np.uint64(31))


@compiled("void(int64[:], int64[:], int64, int64[:], float32[:, ::1])")
def _negated_uniform(
    seeds: Int64Array, positions: Int64Array, stream: int, begins: Int64Array, result: Float32Array
) -> None:
    """Writes minus the uniform numbers of each row's counters from begins[row] on."""
    for row in range(result.shape[0]):
        place = positions[row] ^ (stream << STREAM_SHIFT)
        key = _splitmix64(_splitmix64(np.uint64(seeds[row])) ^ np.uint64(place))
        for i in range(result.shape[1]):
            bits = _splitmix64(key + np.uint64(begins[row] + i) * STEP) >> np.uint64(32)
            result[row, i] = -min((np.float32(bits) + HALF) * UNIT, LARGEST)


@compiled("void(float32[:, ::1], int64[:], float32[:, ::1], int64[:])")
def _first(weights: Float32Array, begins: Int64Array, logs: Float32Array, result: Int64Array) -> None:
    """Writes the first to arrive of a row's entries from begins[row] on; the noise is minus `logs`."""
    for row in range(logs.shape[0]):
        begin = begins[row]
        largest = np.float32(-1)
        for i in range(min(logs.shape[1], weights.shape[1] - begin)):
            speed = weights[row, begin + i] / -logs[row, i]
            if speed > largest:
                largest = speed
                result[row] = begin + i


@compiled("void(int64[:], int32[:], int64[:], int64[:, ::1], int32[:])")
def accept(
    token_ids: Int64Array, cu_num_logits: Int32Array, fed: Int64Array, sampled: Int64Array, num_sampled: Int32Array
) -> None:
    """Emits the tokens of a request's rows up to the first that differs from the draft in the next row. `token_ids` [N]
    holds the token that each row draws. Writes `sampled` and `num_sampled`."""
    for request in range(len(num_sampled)):
        begin = cu_num_logits[request]
        num_rows = min(cu_num_logits[request + 1] - begin, sampled.shape[1])
        count = 0
        while count < num_rows and (count == 0 or fed[begin + count] == token_ids[begin + count - 1]):
            sampled[request, count] = token_ids[begin + count]
            count += 1
        sampled[request, count:] = -1
        num_sampled[request] = count


@compiled([f"void(float32[:, {layout}], int32[:, ::1])" for layout in ("::1", ":")])  # the second for a part of rows
def forbid(logits: Float32Array, masks: Int32Array) -> None:
    """Writes -inf to the logits [N, V] of tokens whose bit in a row of `masks` [N, >= V / 32] is 0."""
    for row in range(logits.shape[0]):
        for word in range(masks.shape[1]):
            bits, first = masks[row, word], 32 * word
            end = min(first + 32, logits.shape[1])
            if bits == 0:
                logits[row, first:end] = NEVER
            elif bits != -1:
                for token in range(first, end):
                    if not (bits >> (token - first)) & 1:
                        logits[row, token] = NEVER


def heat(
    weights: torch.Tensor,  # [N, V] float32
    begins: Int64Array,  # [N]
    size: int,
    seeds: Int64Array,  # [N]
    positions: Int64Array,  # [N]
    stream: int,
) -> Int64Array:
    """Returns the winner [N] of the race among `size` entries of each row."""
    noise, result = np.empty((len(seeds), size), np.float32), begins.copy()
    _negated_uniform(seeds, positions, stream, begins, noise)
    torch.from_numpy(noise).log1p_()
    _first(weights.numpy(), begins, noise, result)
    return result


def draw(weights: torch.Tensor, seeds: Int64Array, positions: Int64Array) -> Int64Array:
    """Draws token ids [N] in proportion to the weights [N, V]; token 0 if all of a row's are 0."""
    sums = group_sums(weights)
    groups = heat(sums, np.zeros(len(seeds), np.int64), sums.shape[1], seeds, positions, GROUP)
    return heat(weights, groups * GROUP_SIZE, min(GROUP_SIZE, weights.shape[1]), seeds, positions, TOKEN)


def draw_rows(logits: torch.Tensor, states: Int64Array, positions: Int64Array, sampling: Sampling) -> Int64Array:
    """Draws token ids [N] from each row [N, vocab_size] under the sampling parameters of its state [N]."""
    temperature, seeds = sampling.temperature.numpy()[states], sampling.seeds.numpy()[states]
    is_drawn, token_ids = temperature != 0, np.empty(len(states), np.int64)
    scale = torch.from_numpy(np.reciprocal(np.where(is_drawn, temperature, ONE)) * LOG2_E)
    for part in chunks(*logits.shape):
        rows, heated = logits[part], is_drawn[part]
        if not heated.all():
            token_ids[part] = finite_with_max(rows)[0].argmax(-1)
        if heated.any():
            if sampling.truncates:
                weighed = weights(rows, sampling.at(torch.from_numpy(states[part])))
            else:
                weighed = weigh(rows, scale[part])[1]
            np.copyto(token_ids[part], draw(weighed, seeds[part], positions[part]), where=heated)
    return token_ids


def rejection_sample(
    target_logits: torch.Tensor, layout: Layout, sampling: Sampling, max_num_draft: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_num_logits, draft_token_ids, positions, idx_mapping = (tensor.numpy() for tensor in layout[:4])
    token_ids = draw_rows(target_logits, idx_mapping.repeat(np.diff(cu_num_logits)), positions, sampling)
    sampled = np.empty((len(idx_mapping), max_num_draft + 1), np.int64)
    num_sampled = np.empty(len(idx_mapping), np.int32)
    accept(token_ids, cu_num_logits.astype(np.int32), draft_token_ids.astype(np.int64), sampled, num_sampled)
    return torch.from_numpy(sampled), torch.from_numpy(num_sampled)
