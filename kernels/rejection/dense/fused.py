"""Modified rejection sampling with draft logits in Triton: one read of both, and of a few groups of one row.

Behind a scan, a program a row weighs its draft, p / q. The last one of a request accepts, and lets the tokens of the
row after the accepted drafts race, in max(p - q, 0), or in p if that is the bonus row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..arguments import Drafts, Layout, Parameters, Result, Target, padded_width
from ..noise.fused import stream_key, uniform
from ..noise.reference import ACCEPT
from ..race.fused import first_of_largest, race
from ..result.fused import is_last, write_result
from ..scan.fused import LARGEST, Scan, load_logits, load_request, load_scan, scale_of
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
    result, num_accepted, ratio, weighed, scanned, target, drafts, layout, parameters, request, num_groups, width,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the accepted drafts of a request, and the token behind: of max(ratio * p - q, 0), or the bonus token."""
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    last = 0
    if num_rows > 0:
        place, row_ptr = request * width + num_accepted, target.logits + (begin + num_accepted) * target.stride
        scale, slot = scale_of(temperature), request * (2 * width - 1) + num_accepted
        maxima, totals, maximum = load_scan(scanned, slot, num_groups, scale, GROUPS)
        if temperature == 0.0:
            last = first_of_largest(row_ptr, maxima, target.vocab_size, GROUP_SIZE)
        else:
            # Nothing is recovered after the last draft: as if a draft had been of an empty vocabulary.
            recovers = num_accepted < num_rows - 1
            p = row_ptr, target.vocab_size, tl.load(weighed.limit + place), maximum, tl.load(weighed.total + place)
            q = (
                drafts.logits + state * drafts.state_stride + num_accepted * drafts.step_stride,
                tl.where(recovers, drafts.vocab_size, 0),
                tl.load(weighed.draft_maximum + place, mask=recovers, other=0.0),
                tl.load(weighed.draft_total + place, mask=recovers, other=1.0),
            )
            seed, position = tl.load(parameters.seeds + state), tl.load(layout.positions + begin + num_accepted)
            last = race(p, q, scale, ratio, seed, position, maxima, totals, GROUPS, GROUP_SIZE)
    steps = tl.arange(0, WIDTH)
    tokens = tl.load(layout.draft_token_ids + begin + 1 + steps, mask=steps < num_accepted, other=-1)
    tokens = tl.where(steps == num_accepted, last, tokens.to(tl.int32))
    write_result(result, request, tokens, tl.minimum(num_accepted + 1, num_rows), width, WIDTH)


@triton.jit
def _draft_ratio(
    weighed, place, scanned, slot, p, drafts, draft_row_ptr, draft, scale, num_groups, GROUPS: tl.constexpr
):
    """p / q of a row's draft; stores what is known of q. Where that is no distribution both are 0."""
    row_ptr, vocab_size, limit, maximum, total = p
    draft_maxima, draft_totals, draft_maximum = load_scan(scanned, slot, num_groups, scale, GROUPS)
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
    """How many drafts of a request are accepted, one by one."""
    begin, num_rows, state, _temperature = load_request(layout, parameters, request)
    steps = tl.arange(0, WIDTH)
    is_draft = steps < num_rows - 1
    ratios = tl.load(weighed.ratio + request * width + steps, mask=is_draft, other=0.0)
    positions = tl.load(layout.positions + begin + steps, mask=is_draft, other=0)
    key = stream_key(tl.load(parameters.seeds + state), positions, _ACCEPT)
    accepted = uniform(key, steps * 0) < ratios
    return tl.min(tl.where(accepted & is_draft, WIDTH, steps), axis=0)


@triton.jit(do_not_specialize=["given"])
def _weigh_kernel(
    # Result, or None: only weigh
    result,
    weighed,
    # [num_reqs, 2 * width - 1, num_groups] int32 to truncate with
    groups_ptr,
    scanned,
    target,
    drafts,
    layout,
    parameters,
    given,
    num_groups,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Weighs the draft of a row; the last row of a request to be weighed accepts and draws."""
    step, request, width = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    begin, num_rows, state, temperature = load_request(layout, parameters, request)
    scale = scale_of(temperature)
    place, slot = request * width + step, (request * (2 * width - 1) + step).to(tl.int64)
    if step < num_rows:
        row_ptr = target.logits + (begin + step) * target.stride
        draft = tl.load(layout.draft_token_ids + begin + step + 1, mask=step < num_rows - 1, other=-1)
        ratio = 0.0
        if temperature == 0.0:
            maxima, _totals, _maximum = load_scan(scanned, slot, num_groups, scale, GROUPS)
            ratio = tl.where(draft == first_of_largest(row_ptr, maxima, target.vocab_size, GROUP_SIZE), 1.0, 0.0)
        else:
            maxima, _totals, maximum, total, limit = load_kept(
                scanned, slot, row_ptr, groups_ptr, parameters, given, state, scale, target.vocab_size, num_groups,
                GROUPS, GROUP_SIZE, CHUNK, KEY_SHIFT,
            )  # fmt: skip
            tl.store(weighed.total + place, total)
            tl.store(weighed.maximum + place, maximum)
            tl.store(weighed.limit + place, limit)
            if step < num_rows - 1:
                p = row_ptr, target.vocab_size, limit, maximum, total
                draft_row_ptr = drafts.logits + state * drafts.state_stride + step * drafts.step_stride
                ratio = _draft_ratio(
                    weighed, place, scanned, slot + width, p, drafts, draft_row_ptr, draft, scale, num_groups, GROUPS
                )
        tl.store(weighed.ratio + place, ratio)
    if result is not None and is_last(scanned.arrivals + request, step, num_rows):
        num_accepted = _num_accepted(weighed, layout, parameters, request, width, WIDTH)
        write_accepted(
            result, num_accepted, 1.0, weighed, scanned, target, drafts, layout, parameters, request, num_groups, width,
            WIDTH, GROUPS, GROUP_SIZE,
        )  # fmt: skip


def weigh(
    # None: only weigh
    result: Result | None,
    scanned: Scan,
    target: Target,
    drafts: Drafts,
    layout: Layout,
    parameters: Parameters,
    given: int,
    width: int,
) -> Weighed:
    """One launch for the batch."""
    num_reqs, _, num_groups = scanned.maximum.shape
    weighed = Weighed(*(scanned.maximum.new_empty(num_reqs, width) for _ in Weighed._fields))
    groups = torch.empty_like(scanned.maximum, dtype=torch.int32)
    _weigh_kernel[(width, num_reqs)](
        result, weighed, groups, scanned, target, drafts, layout, parameters, given, num_groups,
        WIDTH=padded_width(width), **constants(num_groups, target.logits.dtype), num_warps=8,
    )  # fmt: skip
    return weighed
