"""Modified rejection sampling with draft logits in Triton: one read of both, another of one row a request.

Scans leave maxima and sums of each row's tiles; then each draft is judged by itself; then, of the row behind the last
accepted draft, each tile draws from its residual (from p if that is the bonus row); last, the tiles' winners race.
`reference.py` has the algorithm. num_tiles: tiles of a row of the vocabulary; num_parts: parts in which a row's
statistics come, 1 behind a truncation, else num_tiles.
"""

import torch
import triton
import triton.language as tl

from .. import Sampling
from ..fused import _GROUP, _LOG2_E, _TOKEN, TILE_SIZE, finite_maximum, load_logits
from ..noise.fused import exponential, stream_key, uniform
from ..noise.reference import ACCEPT, RECOVERED_GROUP, RECOVERED_TOKEN
from ..reference import GROUP_SIZE
from ..truncation.fused import launch as launch_truncation
from ..truncation.fused import scan

_ACCEPT = tl.constexpr(ACCEPT)
_RECOVERED_GROUP, _RECOVERED_TOKEN = tl.constexpr(RECOVERED_GROUP), tl.constexpr(RECOVERED_TOKEN)


@triton.jit
def _row_stats(maximum_ptr, total_ptr, slot, num_parts, scale, PARTS: tl.constexpr):
    """Largest logit of a row, and the sum of its weights; 1 for a row of -inf alone."""
    parts = tl.arange(0, PARTS)
    maxima = tl.load(maximum_ptr + slot * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    totals = tl.load(total_ptr + slot * num_parts + parts, mask=parts < num_parts, other=0.0)
    maximum = finite_maximum(tl.max(maxima, axis=0))
    return maximum, tl.maximum(tl.sum(totals * tl.exp2((maxima - maximum) * scale), axis=0), 1.0)


@triton.jit
def _argmax_token(maximum_ptr, token_ptr, slot, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    maxima = tl.load(maximum_ptr + slot * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    return tl.load(token_ptr + slot * num_parts + tl.argmax(maxima, axis=0))


@triton.jit
def _num_accepted(accepted_ptr, request, width, num_rows, WIDTH: tl.constexpr):
    """How many drafts of a request are accepted before the first that is not."""
    steps = tl.arange(0, WIDTH)
    is_draft = steps < num_rows - 1
    accepted = tl.load(accepted_ptr + request * width + steps, mask=is_draft, other=0)
    return tl.min(tl.where(is_draft & (accepted != 0), WIDTH, steps), axis=0)


@triton.jit
def _judge_kernel(
    # [num_reqs, width] int32: 1 where the draft that the row predicts is accepted, by itself
    accepted_ptr,
    # [num_reqs, width, num_parts] three times, [num_reqs, width] or None: Stats of the target
    maximum_ptr,
    total_ptr,
    token_ptr,
    limit_ptr,
    # [num_reqs, width - 1, draft_num_parts] twice: of the draft
    draft_maximum_ptr,
    draft_total_ptr,
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_state_stride,
    draft_step_stride,
    draft_token_ids_ptr,
    cu_num_logits_ptr,
    positions_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    vocab_size,
    draft_vocab_size,
    num_parts,
    draft_num_parts,
    PARTS: tl.constexpr,
    DRAFT_PARTS: tl.constexpr,
):
    """Acceptance of one draft: u < p / q."""
    step, request = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_num_logits_ptr + request).to(tl.int64) + step
    if row + 1 >= tl.load(cu_num_logits_ptr + request + 1):
        return
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    draft = tl.load(draft_token_ids_ptr + row + 1)
    width = tl.num_programs(0) + 1
    slot = request * width + step
    if temperature == 0.0:
        accepted = draft == _argmax_token(maximum_ptr, token_ptr, slot, num_parts, PARTS)
    else:
        scale = _LOG2_E / temperature
        known = (draft >= 0) & (draft < vocab_size)
        maximum, total = _row_stats(maximum_ptr, total_ptr, slot, num_parts, scale, PARTS)
        logit = load_logits(logits_ptr + row * logits_stride, draft, known)
        p = tl.exp2((logit - maximum) * scale) / total
        if limit_ptr is not None:
            p = tl.where(logit >= tl.load(limit_ptr + slot), p, 0.0)
        draft_slot = request * (width - 1) + step
        maximum, total = _row_stats(draft_maximum_ptr, draft_total_ptr, draft_slot, draft_num_parts, scale, DRAFT_PARTS)
        draft_row_ptr = draft_logits_ptr + state * draft_state_stride + step * draft_step_stride
        logit = load_logits(draft_row_ptr, draft, known & (draft < draft_vocab_size))
        q = tl.exp2((logit - maximum) * scale) / total
        key = stream_key(tl.load(seeds_ptr + state), tl.load(positions_ptr + row), _ACCEPT)
        accepted = known & (p > 0.0) & (uniform(key, step * 0) < p / q)
    tl.store(accepted_ptr + slot, accepted.to(tl.int32))


@triton.jit
def _recover_kernel(
    # [num_reqs, num_tiles] float32, int32: what each tile leaves
    rate_ptr,
    token_out_ptr,
    accepted_ptr,
    maximum_ptr,
    total_ptr,
    limit_ptr,
    draft_maximum_ptr,
    draft_total_ptr,
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_state_stride,
    draft_step_stride,
    cu_num_logits_ptr,
    positions_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    vocab_size,
    draft_vocab_size,
    width,
    num_parts,
    draft_num_parts,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    DRAFT_PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """The race of one tile for the recovered or bonus token, in weights max(p - q, 0)."""
    tile, request = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + request + 1) - begin
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    if (num_rows == 0) | (temperature == 0.0):
        return
    scale = _LOG2_E / temperature
    step = _num_accepted(accepted_ptr, request, width, num_rows, WIDTH)
    is_draft = step < num_rows - 1
    row, slot = begin + step, request * width + step
    maximum, total = _row_stats(maximum_ptr, total_ptr, slot, num_parts, scale, PARTS)
    limit = float("-inf") if limit_ptr is None else tl.load(limit_ptr + slot)
    draft_step = tl.minimum(step, width - 2)
    draft_slot = request * (width - 1) + draft_step
    draft_maximum, draft_total = _row_stats(
        draft_maximum_ptr, draft_total_ptr, draft_slot, draft_num_parts, scale, DRAFT_PARTS
    )
    row_ptr = logits_ptr + row * logits_stride
    draft_row_ptr = draft_logits_ptr + state * draft_state_stride + draft_step * draft_step_stride
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    offsets = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    logits = load_logits(row_ptr, offsets, offsets < vocab_size)
    p = tl.where(logits >= limit, tl.exp2((logits - maximum) * scale) / total, 0.0)
    draft_logits = load_logits(draft_row_ptr, offsets, offsets < tl.where(is_draft, draft_vocab_size, 0))
    q = tl.where(is_draft, tl.exp2((draft_logits - draft_maximum) * scale) / draft_total, 0.0)
    # Where rounding leaves nothing of max(p - q, 0) it is p that is left.
    weights = tl.maximum(p - q, 0.0) + p * 8.271806125530277e-25
    seed, position = tl.load(seeds_ptr + state), tl.load(positions_ptr + row)
    group_stream = tl.where(is_draft, _RECOVERED_GROUP, _GROUP).to(tl.int64)
    token_stream = tl.where(is_draft, _RECOVERED_TOKEN, _TOKEN).to(tl.int64)
    rates = tl.sum(weights, axis=1) / exponential(stream_key(seed, position, group_stream), groups)
    rate, winner = tl.max(rates, axis=0, return_indices=True)
    chosen = tl.sum(tl.where((groups == tile * GROUPS + winner)[:, None], weights, 0.0), axis=0)
    tokens = (tile * GROUPS + winner) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    token_rates = chosen / exponential(stream_key(seed, position, token_stream), tokens)
    place = request * tl.num_programs(0) + tile
    tl.store(rate_ptr + place, rate)
    tl.store(token_out_ptr + place, (tile * GROUPS + winner) * GROUP_SIZE + tl.argmax(token_rates, axis=0))


@triton.jit
def _finish_kernel(
    # [num_reqs, width] int64, [num_reqs] int32
    sampled_ptr,
    num_sampled_ptr,
    accepted_ptr,
    rate_ptr,
    token_ptr,
    maximum_ptr,
    greedy_token_ptr,
    draft_token_ids_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    width,
    num_tiles,
    num_parts,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The accepted drafts of a request and its last token."""
    request = tl.program_id(0)
    begin, end = tl.load(cu_num_logits_ptr + request), tl.load(cu_num_logits_ptr + request + 1)
    num_rows = end - begin
    steps, tiles = tl.arange(0, WIDTH), tl.arange(0, TILES)
    num_accepted = _num_accepted(accepted_ptr, request, width, num_rows, WIDTH)
    temperature = tl.load(temperature_ptr + tl.load(idx_mapping_ptr + request))
    last = tl.full((), -1, tl.int32)
    if num_rows > 0:
        if temperature == 0.0:
            last = _argmax_token(maximum_ptr, greedy_token_ptr, request * width + num_accepted, num_parts, PARTS)
        else:
            rates = tl.load(rate_ptr + request * num_tiles + tiles, mask=tiles < num_tiles, other=-1.0)
            last = tl.load(token_ptr + request * num_tiles + tl.argmax(rates, axis=0))
    drafts = tl.load(draft_token_ids_ptr + begin + 1 + steps, mask=steps < num_accepted, other=-1).to(tl.int64)
    tokens = tl.where(steps == num_accepted, last.to(tl.int64), drafts)
    tl.store(sampled_ptr + request * width + steps, tokens, mask=steps < width)
    tl.store(num_sampled_ptr + request, tl.minimum(num_accepted + 1, num_rows))


def launch(
    sampled: torch.Tensor,  # [num_reqs, width] int64, to be written
    num_sampled: torch.Tensor,  # [num_reqs] int32, to be written
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    sampling: Sampling,
) -> None:
    """Four launches for the batch, one more with truncation."""
    (num_reqs, width), vocab_size, draft_vocab_size = sampled.shape, target_logits.shape[-1], draft_logits.shape[-1]
    layout, parameters = (cu_num_logits, positions, idx_mapping), (sampling.temperature, sampling.seeds)
    if sampling.truncates:
        target = launch_truncation(target_logits, *layout, sampling, width)
    else:
        target = scan(target_logits, cu_num_logits, idx_mapping, sampling.temperature, width, TILE_SIZE)
    draft = scan(draft_logits, cu_num_logits, idx_mapping, sampling.temperature, width - 1, TILE_SIZE)
    num_parts, draft_num_parts = target.maximum.shape[-1], draft.maximum.shape[-1]
    constants = {
        "PARTS": triton.next_power_of_2(num_parts),
        "DRAFT_PARTS": triton.next_power_of_2(draft_num_parts),
    }
    logits = target_logits, target_logits.stride(0), draft_logits, draft_logits.stride(0), draft_logits.stride(1)
    accepted = torch.empty_like(sampled, dtype=torch.int32)
    _judge_kernel[(width - 1, num_reqs)](
        accepted, *target, draft.maximum, draft.total, *logits, draft_token_ids, *layout, *parameters,
        vocab_size, draft_vocab_size, num_parts, draft_num_parts, **constants, num_warps=1,
    )  # fmt: skip
    num_tiles = triton.cdiv(vocab_size, TILE_SIZE)
    rate = target_logits.new_empty(num_reqs, num_tiles, dtype=torch.float32)
    token = torch.empty_like(rate, dtype=torch.int32)
    padded_width = triton.next_power_of_2(width)
    _recover_kernel[(num_tiles, num_reqs)](
        rate, token, accepted, target.maximum, target.total, target.limit, draft.maximum, draft.total, *logits,
        *layout, *parameters, vocab_size, draft_vocab_size, width, num_parts, draft_num_parts, WIDTH=padded_width,
        **constants, GROUPS=TILE_SIZE // GROUP_SIZE, GROUP_SIZE=GROUP_SIZE, num_warps=8,
    )  # fmt: skip
    _finish_kernel[(num_reqs,)](
        sampled, num_sampled, accepted, rate, token, target.maximum, target.token, draft_token_ids, cu_num_logits,
        idx_mapping, sampling.temperature, width, num_tiles, num_parts, WIDTH=padded_width,
        TILES=triton.next_power_of_2(num_tiles), PARTS=constants["PARTS"], num_warps=1,
    )  # fmt: skip
