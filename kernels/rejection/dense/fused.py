"""Modified rejection sampling with draft logits in Triton: one read of both, and of a few groups of one row.

Behind a scan, a program a row weighs its draft, p / q. The last one of a request accepts, and lets the tokens of the
row behind the accepted drafts race, in max(p - q, 0), or in p if that is the bonus row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import Sampling
from ..noise.fused import stream_key, uniform
from ..noise.reference import ACCEPT
from ..race.fused import first_of_largest, race
from ..result.fused import is_last, write_result
from ..scan.fused import Scan, load_logits, load_scan, scale_of
from ..truncation.fused import constants, load_kept

_ACCEPT = tl.constexpr(ACCEPT)


class Weighed(NamedTuple):
    """What is known of the target's rows [num_reqs, width], float32 each."""

    # p / q of the draft that the row predicts, 0 for none
    ratio: torch.Tensor
    # largest logit, sum of the weights kept, smallest logit kept; undefined at temperature 0, as all below
    maximum: torch.Tensor
    total: torch.Tensor
    limit: torch.Tensor
    # largest logit of the draft, sum of its weights
    draft_maximum: torch.Tensor
    draft_total: torch.Tensor


@triton.jit
def write_accepted(
    sampled_ptr, num_sampled_ptr, num_accepted, ratio, maximum_ptr, total_ptr, limit_ptr, draft_maximum_ptr,
    draft_total_ptr, group_maximum_ptr, group_total_ptr, logits_ptr, logits_stride, draft_ptr, draft_step_stride,
    draft_token_ids_ptr, positions_ptr, begin, num_rows, temperature, seed, request, width, vocab_size,
    draft_vocab_size, num_groups, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the accepted drafts of a request, and the token behind: of max(ratio * p - q, 0), or the bonus token."""
    last = 0
    if num_rows > 0:
        place, row_ptr = request * width + num_accepted, logits_ptr + (begin + num_accepted) * logits_stride
        scale, slot = scale_of(temperature), request * (2 * width - 1) + num_accepted
        maxima, totals, maximum = load_scan(group_maximum_ptr, group_total_ptr, slot, num_groups, scale, GROUPS)
        if temperature == 0.0:
            last = first_of_largest(row_ptr, maxima, vocab_size, GROUP_SIZE)
        else:
            # Nothing is recovered behind the last draft: as if a draft had been of an empty vocabulary.
            recovers = num_accepted < num_rows - 1
            last = race(
                row_ptr, draft_ptr + num_accepted * draft_step_stride, seed,
                tl.load(positions_ptr + begin + num_accepted), maxima, totals, vocab_size,
                tl.where(recovers, draft_vocab_size, 0), tl.load(limit_ptr + place), scale, maximum,
                tl.load(total_ptr + place), tl.load(draft_maximum_ptr + place, mask=recovers, other=0.0),
                tl.load(draft_total_ptr + place, mask=recovers, other=1.0), ratio, GROUPS, GROUP_SIZE,
            )  # fmt: skip
    steps = tl.arange(0, WIDTH)
    drafts = tl.load(draft_token_ids_ptr + begin + 1 + steps, mask=steps < num_accepted, other=-1)
    tokens = tl.where(steps == num_accepted, last, drafts.to(tl.int32))
    num_sampled = tl.minimum(num_accepted + 1, num_rows)
    write_result(sampled_ptr, num_sampled_ptr, request, tokens, num_sampled, width, WIDTH)


@triton.jit
def _weigh_kernel(
    # [num_reqs, width] int64, [num_reqs] int32; None: only weigh
    sampled_ptr,
    num_sampled_ptr,
    # Weighed
    ratio_ptr,
    maximum_ptr,
    total_ptr,
    limit_ptr,
    draft_maximum_ptr,
    draft_total_ptr,
    # [num_reqs, 2 * width - 1, num_groups] int32 to truncate with, or None
    groups_ptr,
    # Scan
    group_maximum_ptr,
    group_total_ptr,
    arrivals_ptr,
    logits_ptr,
    logits_stride,
    # [num_states, >= width - 1, draft_vocab_size]
    draft_logits_ptr,
    draft_state_stride,
    draft_step_stride,
    draft_token_ids_ptr,
    cu_num_logits_ptr,
    positions_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    vocab_size,
    draft_vocab_size,
    num_groups,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Weighs the draft of a row; the last row of a request to be weighed accepts and draws."""
    step, request, width = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    begin = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + request + 1) - begin).to(tl.int32)
    state = tl.load(idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(temperature_ptr + state)
    scale = scale_of(temperature)
    place, slot = request * width + step, (request * (2 * width - 1) + step).to(tl.int64)
    draft_ptr = draft_logits_ptr + state * draft_state_stride
    if step < num_rows:
        row_ptr = logits_ptr + (begin + step) * logits_stride
        draft = tl.load(draft_token_ids_ptr + begin + step + 1, mask=step < num_rows - 1, other=-1)
        if temperature == 0.0:
            maxima, _totals, _maximum = load_scan(group_maximum_ptr, group_total_ptr, slot, num_groups, scale, GROUPS)
            ratio = tl.where(draft == first_of_largest(row_ptr, maxima, vocab_size, GROUP_SIZE), 1.0, 0.0)
        else:
            maxima, _totals, maximum, total, limit = load_kept(
                group_maximum_ptr, group_total_ptr, slot, row_ptr, groups_ptr, scale, state, top_k_ptr, top_p_ptr,
                min_p_ptr, vocab_size, num_groups, GROUPS, GROUP_SIZE, CHUNK, KEY_SHIFT,
            )  # fmt: skip
            tl.store(maximum_ptr + place, maximum)
            tl.store(total_ptr + place, total)
            tl.store(limit_ptr + place, limit)
            ratio = 0.0
            if step < num_rows - 1:
                _draft_maxima, draft_totals, draft_maximum = load_scan(
                    group_maximum_ptr, group_total_ptr, slot + width, num_groups, scale, GROUPS
                )
                draft_total = tl.maximum(tl.sum(draft_totals, axis=0), 1.0)
                tl.store(draft_maximum_ptr + place, draft_maximum)
                tl.store(draft_total_ptr + place, draft_total)
                known = (draft >= 0) & (draft < vocab_size)
                logit = load_logits(row_ptr, draft, known)
                p = tl.where(logit >= limit, tl.exp2((logit - maximum) * scale) / total, 0.0)
                logit = load_logits(draft_ptr + step * draft_step_stride, draft, known & (draft < draft_vocab_size))
                q = tl.exp2((logit - draft_maximum) * scale) / draft_total
                ratio = tl.where(known & (p > 0.0), p / q, 0.0)
        tl.store(ratio_ptr + place, ratio)
    if sampled_ptr is not None and is_last(arrivals_ptr + request, step, num_rows):
        steps = tl.arange(0, WIDTH)
        is_draft = steps < num_rows - 1
        ratios = tl.load(ratio_ptr + request * width + steps, mask=is_draft, other=0.0)
        positions = tl.load(positions_ptr + begin + steps, mask=is_draft, other=0)
        seed = tl.load(seeds_ptr + state)
        accepted = uniform(stream_key(seed, positions, _ACCEPT), steps * 0) < ratios
        num_accepted = tl.min(tl.where(accepted & is_draft, WIDTH, steps), axis=0)
        write_accepted(
            sampled_ptr, num_sampled_ptr, num_accepted, 1.0, maximum_ptr, total_ptr, limit_ptr, draft_maximum_ptr,
            draft_total_ptr, group_maximum_ptr, group_total_ptr, logits_ptr, logits_stride, draft_ptr,
            draft_step_stride, draft_token_ids_ptr, positions_ptr, begin, num_rows, temperature, seed, request, width,
            vocab_size, draft_vocab_size, num_groups, WIDTH, GROUPS, GROUP_SIZE,
        )  # fmt: skip


def weigh(
    result: tuple[torch.Tensor | None, torch.Tensor | None],  # [num_reqs, width] int64, [num_reqs] int32, to be written
    scanned: Scan,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    sampling: Sampling,
    width: int,
) -> Weighed:
    """One launch for the batch; without a result it only weighs."""
    num_reqs, num_groups = len(idx_mapping), scanned.maximum.shape[-1]
    weighed = Weighed(*(target_logits.new_empty(num_reqs, width, dtype=torch.float32) for _ in Weighed._fields))
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32) if sampling.truncates else None
    _weigh_kernel[(width, num_reqs)](
        *result, *weighed, groups, *scanned, target_logits, target_logits.stride(0), draft_logits,
        *draft_logits.stride()[:2], draft_token_ids, cu_num_logits, positions, idx_mapping, sampling.temperature,
        sampling.seeds, sampling.top_k, sampling.top_p, sampling.min_p, target_logits.shape[-1],
        draft_logits.shape[-1], num_groups, WIDTH=triton.next_power_of_2(width),
        **constants(num_groups, target_logits.dtype), num_warps=8,
    )  # fmt: skip
    return weighed
