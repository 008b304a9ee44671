"""The tokens that a request emits, in Triton: one program works on each row, and a request's last program to finish
decides. With a one-hot q each row draws a token and compares it with the draft. With draft logits each row computes p /
q of its draft, and in the row after the accepted drafts the tokens race with weights max(p - q, 0), or p in the bonus
row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import Layout
from .arguments import Drafts, Parameters, Result, Target, padded_width
from .noise import ACCEPT
from .race_fused import first_of_largest, race, stream_key, uniform
from .scan_fused import LARGEST, Scan, load_logits, load_request, load_scan, scale_of
from .truncation_fused import load_kept

_ACCEPT = tl.constexpr(ACCEPT)
GREEDY = 8  # in place of given limits: all rows emit their argmax
_GREEDY = tl.constexpr(GREEDY)


class Weighed(NamedTuple):
    """Results for the target's rows, [num_reqs, width] float32 each."""

    # p / q of the draft that the row predicts, 0 without one
    ratio: torch.Tensor
    # largest logit, sum of the weights that are not cut, threshold; undefined at temperature 0, as all below
    maximum: torch.Tensor
    total: torch.Tensor
    limit: torch.Tensor
    # largest logit of the draft, sum of its weights
    draft_maximum: torch.Tensor
    draft_total: torch.Tensor


@triton.jit
def is_last(arrivals_ptr, index, num_programs):
    """Returns whether this is the last program of a request to arrive, which can load all results of the others. For a
    request without rows it is the first one."""
    # All threads store before one counts, with a GPU-wide release and acquire.
    tl.debug_barrier()
    result = (num_programs == 0) & (index == 0)
    if index < num_programs:
        result = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    return result


@triton.jit
def _write(result, request, tokens, num_sampled, width, WIDTH: tl.constexpr):
    steps = tl.arange(0, WIDTH)
    tokens = tl.where(steps < num_sampled, tokens.to(tl.int64), -1)
    tl.store(result.sampled + request * width + steps, tokens, mask=steps < width)
    tl.store(result.num_sampled + request, num_sampled)


@triton.jit
def _write_drawn(result, layout, request, begin, num_rows, tokens, width, WIDTH: tl.constexpr):
    """With a one-hot q, stores the rows' tokens [WIDTH] up to the first that is not the draft."""
    steps = tl.arange(0, WIDTH)
    is_draft, fed = steps < num_rows - 1, begin + 1 + steps  # rows after a request's first
    if layout.logits_indices is not None:
        fed = tl.load(layout.logits_indices + fed, mask=is_draft, other=0)
    drafts = tl.load(layout.draft_token_ids + fed, mask=is_draft, other=-1)
    rejected = tl.where((drafts.to(tl.int32) == tokens) & is_draft, WIDTH, steps)
    num_sampled = tl.minimum(tl.min(rejected, axis=0) + 1, num_rows)
    if result.num_rejected is not None:
        prefill_len = tl.load(layout.prefill_len + tl.load(layout.idx_mapping + request))
        first = tl.load(layout.logits_indices + begin, mask=num_rows > 0, other=0)
        # Nothing was drafted after a token of the prompt: the fed tokens are placeholders.
        is_prompts = tl.load(layout.positions + first) < prefill_len
        goes_on = tl.load(layout.seq_lens + request) < prefill_len
        num_sampled = tl.where(is_prompts, tl.minimum(num_sampled, 1), num_sampled)
        num_sampled = tl.where(goes_on, 0, num_sampled)
        tl.store(result.num_rejected + request, tl.where(goes_on, 0, num_rows - num_sampled))
    _write(result, request, tokens, num_sampled, width, WIDTH)


@triton.jit(do_not_specialize=["given"])
def _draw_kernel(
    result,
    # [num_reqs, width] int32: the token of each row
    token_ptr,
    # same, float32: its threshold
    limit_ptr,
    # same, float32, or None: the largest probability
    largest_ptr,
    # [num_rows, num_groups] int32
    groups_ptr,
    scanned,
    target,
    layout,
    parameters,
    given,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    step, request, width = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    if step < num_rows:
        scale, row = scale_of(temperature), begin + step
        row_ptr, slot = target.logits + row * target.stride, (request * width + step).to(tl.int64)
        if (temperature == 0.0) | (given == _GREEDY):
            maxima, totals, maximum = load_scan(scanned, row, scale, GROUPS)
            token = first_of_largest(row_ptr, maxima, target.vocab_size)
            limit = float("-inf")
        else:
            maxima, totals, maximum, total, limit = load_kept(
                scanned, row, row_ptr, groups_ptr, parameters, given, state, scale, target.vocab_size, GROUPS
            )
            if layout.logits_indices is not None:
                position = tl.load(layout.positions + tl.load(layout.logits_indices + row)) + 1
            else:
                position = tl.load(layout.positions + row)
            p = row_ptr, target.vocab_size, limit, maximum, total
            token = race(p, None, scale, tl.load(parameters.seeds + state), position, maxima, totals, GROUPS)
        tl.store(token_ptr + slot, token)
        tl.store(limit_ptr + slot, limit)
        if largest_ptr is not None:
            tl.store(largest_ptr + slot, 1.0 / tl.maximum(tl.sum(totals, axis=0), 1.0))
    if is_last(scanned.arrivals + request, step, num_rows):
        steps = tl.arange(0, WIDTH)
        tokens = tl.load(token_ptr + request * width + steps, mask=steps < num_rows, other=-1)
        _write_drawn(result, layout, request, begin, num_rows, tokens, width, WIDTH)


@triton.jit
def _load_weighed(weighed, target, drafts, begin, num_rows, state, step, first):
    # The bonus row recovers nothing, as if a draft had an empty vocabulary.
    place, has_draft = first + step, step < num_rows - 1
    row_ptr = target.logits + (begin + step) * target.stride
    p = (
        row_ptr, target.vocab_size, tl.load(weighed.limit + place), tl.load(weighed.maximum + place),
        tl.load(weighed.total + place),
    )  # fmt: skip
    draft_row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
    q = (
        draft_row_ptr, tl.where(has_draft, drafts.vocab_size, 0),
        tl.load(weighed.draft_maximum + place, mask=has_draft, other=0.0),
        tl.load(weighed.draft_total + place, mask=has_draft, other=1.0),
    )  # fmt: skip
    return p, q


@triton.jit
def _write_accepted(
    result, num_accepted, weighed, scanned, target, drafts, layout, parameters, request, width,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    last = 0
    if num_rows > 0:
        scale = scale_of(temperature)
        maxima, totals, _maximum = load_scan(scanned, begin + num_accepted, scale, GROUPS)
        if temperature == 0.0:
            row_ptr = target.logits + (begin + num_accepted) * target.stride
            last = first_of_largest(row_ptr, maxima, target.vocab_size)
        else:
            p, q = _load_weighed(weighed, target, drafts, begin, num_rows, state, num_accepted, request * width)
            seed, position = tl.load(parameters.seeds + state), tl.load(layout.positions + begin + num_accepted)
            last = race(p, q, scale, seed, position, maxima, totals, GROUPS)
    steps = tl.arange(0, WIDTH)
    tokens = tl.load(layout.draft_token_ids + begin + 1 + steps, mask=steps < num_accepted, other=-1)
    tokens = tl.where(steps == num_accepted, last, tokens.to(tl.int32))
    _write(result, request, tokens, tl.minimum(num_accepted + 1, num_rows), width, WIDTH)


@triton.jit
def _draft_ratio(weighed, place, scanned, slot, p, drafts, draft_row_ptr, draft, scale, GROUPS: tl.constexpr):
    """Returns p / q of a row's draft, 0 where q is no distribution. Stores the maximum and the sum of q."""
    row_ptr, vocab_size, limit, maximum, total = p
    draft_maxima, draft_totals, draft_maximum = load_scan(scanned, slot, scale, GROUPS)
    largest = tl.max(draft_maxima, axis=0)
    is_distribution = (largest > float("-inf")) & (largest <= LARGEST)
    draft_maximum = tl.where(is_distribution, draft_maximum, LARGEST)
    draft_total = tl.where(is_distribution, tl.maximum(tl.sum(draft_totals, axis=0), 1.0), float("inf"))
    tl.store(weighed.draft_maximum + place, draft_maximum)
    tl.store(weighed.draft_total + place, draft_total)
    known = (draft >= 0) & (draft < vocab_size)
    logit = load_logits(row_ptr, draft, known)
    p_draft = tl.where(logit >= limit, tl.exp2((logit - maximum) * scale) / total, 0.0)
    logit = load_logits(draft_row_ptr, draft, known & (draft < drafts.vocab_size))
    q_draft = tl.exp2((logit - draft_maximum) * scale) / draft_total
    return tl.where(known & (p_draft > 0.0) & is_distribution, p_draft / q_draft, 0.0)


@triton.jit
def _num_accepted(weighed, layout, parameters, request, width, WIDTH: tl.constexpr):
    begin, num_rows, state, _temperature = load_request(layout, parameters, request)
    steps = tl.arange(0, WIDTH)
    is_draft = steps < num_rows - 1
    ratios = tl.load(weighed.ratio + request * width + steps, mask=is_draft, other=0.0)
    positions = tl.load(layout.positions + begin + steps, mask=is_draft, other=0)
    key = stream_key(tl.load(parameters.seeds + state), positions, _ACCEPT)
    accepted = uniform(key, steps * 0) < ratios
    return tl.min(tl.where(accepted & is_draft, WIDTH, steps), axis=0)


@triton.jit(do_not_specialize=["given", "num_logits"])
def _weigh_kernel(
    result,
    weighed,
    # [num_rows, num_groups] int32 to truncate with
    groups_ptr,
    scanned,
    target,
    drafts,
    layout,
    parameters,
    given,
    num_logits,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    step, request, width = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    scale = scale_of(temperature)
    place, row = request * width + step, begin + step
    if step < num_rows:
        row_ptr = target.logits + row * target.stride
        draft = tl.load(layout.draft_token_ids + begin + step + 1, mask=step < num_rows - 1, other=-1)
        ratio = 0.0
        if temperature == 0.0:
            maxima, _totals, _maximum = load_scan(scanned, row, scale, GROUPS)
            ratio = tl.where(draft == first_of_largest(row_ptr, maxima, target.vocab_size), 1.0, 0.0)
        else:
            maxima, _totals, maximum, total, limit = load_kept(
                scanned, row, row_ptr, groups_ptr, parameters, given, state, scale, target.vocab_size, GROUPS
            )
            tl.store(weighed.total + place, total)
            tl.store(weighed.maximum + place, maximum)
            tl.store(weighed.limit + place, limit)
            if step < num_rows - 1:
                p = row_ptr, target.vocab_size, limit, maximum, total
                draft_row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
                slot = num_logits + row
                ratio = _draft_ratio(weighed, place, scanned, slot, p, drafts, draft_row_ptr, draft, scale, GROUPS)
        tl.store(weighed.ratio + place, ratio)
    if is_last(scanned.arrivals + request, step, num_rows):
        num_accepted = _num_accepted(weighed, layout, parameters, request, width, WIDTH)
        _write_accepted(
            result, num_accepted, weighed, scanned, target, drafts, layout, parameters, request, width, WIDTH, GROUPS
        )  # fmt: skip


def draw(
    result: Result,
    scanned: Scan,
    target: Target,
    layout: Layout,
    parameters: Parameters,
    given: int,
    largest_probs: torch.Tensor | None = None,  # [num_reqs, width], written
) -> torch.Tensor:
    """Draws with a one-hot q, in one launch; returns the rows' thresholds [num_reqs, width]."""
    num_reqs, width = result.sampled.shape
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32)
    token, limit = (torch.empty_like(result.sampled, dtype=dtype) for dtype in (torch.int32, torch.float32))
    _draw_kernel[(width, num_reqs)](
        result, token, limit, largest_probs, groups, scanned, target, layout, parameters, given,
        WIDTH=padded_width(width), GROUPS=triton.next_power_of_2(scanned.num_groups), num_warps=8,
    )  # fmt: skip
    return limit


def weigh(
    result: Result, scanned: Scan, target: Target, drafts: Drafts, layout: Layout, parameters: Parameters, given: int
) -> Weighed:
    num_reqs, width = result.sampled.shape
    weighed = Weighed(*(scanned.maximum.new_empty(num_reqs, width) for _ in Weighed._fields))
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32)
    _weigh_kernel[(width, num_reqs)](
        result, weighed, groups, scanned, target, drafts, layout, parameters, given, len(target.logits),
        WIDTH=padded_width(width), GROUPS=triton.next_power_of_2(scanned.num_groups), num_warps=8,
    )  # fmt: skip
    return weighed
