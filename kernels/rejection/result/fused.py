"""What a request emits, written by one program in Triton: the one that comes last, if a program has a row."""

import triton
import triton.language as tl


@triton.jit
def is_last(arrivals_ptr, index, num_programs):
    """Whether all others of a request's programs have come here; what they stored before can then be loaded.

    Of a request without rows, which has none, it is the first.
    """
    # All threads have stored before one counts, with a GPU-wide release; what comes back is a GPU-wide acquire.
    tl.debug_barrier()
    result = (num_programs == 0) & (index == 0)
    if index < num_programs:
        result = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    return result


@triton.jit
def write_result(result, request, tokens, num_sampled, width, WIDTH: tl.constexpr):
    """The first of tokens [WIDTH], and -1 after them."""
    steps = tl.arange(0, WIDTH)
    tokens = tl.where(steps < num_sampled, tokens.to(tl.int64), -1)
    tl.store(result.sampled + request * width + steps, tokens, mask=steps < width)
    tl.store(result.num_sampled + request, num_sampled)


@triton.jit
def _load_drafts(layout, begin, is_draft, WIDTH: tl.constexpr):
    """The tokens [WIDTH] that are fed after a request's first."""
    rows = begin + 1 + tl.arange(0, WIDTH)
    if layout.logits_indices is not None:
        rows = tl.load(layout.logits_indices + rows, mask=is_draft, other=0)
    return tl.load(layout.draft_token_ids + rows, mask=is_draft, other=-1)


@triton.jit
def _of_prompt(layout, request, begin, num_rows, num_sampled):
    """What is left of the number of tokens sampled in a step's request, and whether its prompt goes on after it."""
    prefill_len = tl.load(layout.prefill_len + tl.load(layout.idx_mapping + request))
    first = tl.load(layout.logits_indices + begin, mask=num_rows > 0, other=0)
    # Behind a token of the prompt nothing was drafted: what is fed there holds a place.
    is_prompts = tl.load(layout.positions + first) < prefill_len
    goes_on = tl.load(layout.seq_lens + request) < prefill_len
    num_sampled = tl.where(is_prompts, tl.minimum(num_sampled, 1), num_sampled)
    return tl.where(goes_on, 0, num_sampled), goes_on


@triton.jit
def write_drawn(result, layout, request, begin, num_rows, tokens, width, WIDTH: tl.constexpr):
    """With a one-hot q: tokens [WIDTH] that the rows drew, up to the first that is not its draft."""
    steps = tl.arange(0, WIDTH)
    is_draft = steps < num_rows - 1
    drafts = _load_drafts(layout, begin, is_draft, WIDTH)
    rejected = tl.where((drafts.to(tl.int32) == tokens) & is_draft, WIDTH, steps)
    num_sampled = tl.minimum(tl.min(rejected, axis=0) + 1, num_rows)
    if result.num_rejected is not None:
        num_sampled, goes_on = _of_prompt(layout, request, begin, num_rows, num_sampled)
        tl.store(result.num_rejected + request, tl.where(goes_on, 0, num_rows - num_sampled))
    write_result(result, request, tokens, num_sampled, width, WIDTH)
