"""Edits of logits in one launch, which reads the logits once. Each program handles a tile of a row. It first writes the
row's lists into the output: 0, a bias, or -inf. Lists are short compared with the vocabulary, so each program reads
them whole and stores the entries of its tile, with a barrier between lists. Rows without edits are copied. Nothing
waits for the host, so a CUDA graph can record it."""

from typing import Any

import torch
import triton
import triton.language as tl

from .. import Layout
from ..arguments import layout_of, target_of
from . import Edits

# 8 logits a thread, as many counts, and the masks, in 64 registers: four programs on a multiprocessor of 65,536.
TILE_SIZE, _NUM_WARPS = 2048, 8
_BLOCK_SIZE = 256


@triton.jit
def _length(entries, state):
    if entries is None:
        return 0
    else:
        return tl.load(entries[0] + state)


@triton.jit
def _put(result_ptr, token_ids_ptr, num_tokens, value, first, last, BLOCK: tl.constexpr):
    for start in range(0, num_tokens, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        tokens = tl.load(token_ids_ptr + entries, mask=entries < num_tokens, other=-1)
        tl.store(result_ptr + tokens, value, mask=(tokens >= first) & (tokens < last))


@triton.jit
def _add(result_ptr, token_ids_ptr, values_ptr, num_tokens, first, last, BLOCK: tl.constexpr):
    """Adds values at the listed tokens from `first` to `last`; a list has a token once."""
    for start in range(0, num_tokens, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        tokens = tl.load(token_ids_ptr + entries, mask=entries < num_tokens, other=-1)
        inside = (tokens >= first) & (tokens < last)
        sums = tl.load(result_ptr + tokens, mask=inside) + tl.load(values_ptr + entries, mask=inside)
        tl.store(result_ptr + tokens, sums, mask=inside)


@triton.jit
def _put_after(
    result_ptr, bad_words, num_words, state, drafts_ptr, step, position, first, last, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores -inf at the last tokens of words if the others were emitted; `drafts_ptr` is at the row's fed token."""
    _, offsets_ptr, token_ids_ptr, history_ptr, prompt_lengths_ptr, offsets_stride, tokens_stride, stride = bad_words
    offsets_ptr += state * offsets_stride
    token_ids_ptr += state * tokens_stride
    prompt_length = tl.load(prompt_lengths_ptr + state)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        begins = tl.load(offsets_ptr + words, mask=words < num_words, other=0)
        ends = tl.load(offsets_ptr + words + 1, mask=words < num_words, other=0)
        tokens = tl.load(token_ids_ptr + ends - 1, mask=ends > begins, other=-1)
        matches = (tokens >= first) & (tokens < last)
        for back in range(1, tl.max(tl.where(matches, ends - begins, 0))):
            # The last emitted token is the one fed at the row, unless the row is its request's first.
            place = position - back
            emitted = (back > step) & (place >= prompt_length)
            token = tl.load(history_ptr + state * stride + place, mask=emitted, other=-1)
            if back <= step:
                token = tl.load(drafts_ptr + 1 - back).to(tl.int32)
            entries = ends - 1 - back
            expected = tl.load(token_ids_ptr + entries, mask=matches & (entries >= begins), other=-1)
            matches &= (entries < begins) | (expected == token)
        tl.store(result_ptr + tokens, float("-inf"), mask=matches)


@triton.jit
def _bits(words_ptr, words, num_words):
    packed = tl.load(words_ptr + words, mask=words < num_words, other=0)
    return (packed[:, None] >> tl.arange(0, 32)[None, :]) & 1


@triton.jit
def _penalized(logits, penalties, state, drafts_ptr, num_drafts, offsets, words, num_words, inside):
    """Applies penalties to a tile's logits; `drafts_ptr` is at the request's first draft."""
    repetition_ptr, frequency_ptr, presence_ptr, prompt_ptr, counts_ptr, prompt_stride, counts_stride = penalties
    repetition = tl.load(repetition_ptr + state)
    frequency, presence = tl.load(frequency_ptr + state), tl.load(presence_ptr + state)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        counts = tl.load(counts_ptr + state * counts_stride + offsets, mask=inside, other=0)
        for draft in range(num_drafts):
            counts += (offsets == tl.load(drafts_ptr + draft)).to(tl.int32)
        is_emitted = counts > 0
        if repetition != 1.0:
            prompt = _bits(prompt_ptr + state * prompt_stride, words, num_words)
            scale = tl.where(is_emitted | (prompt != 0), repetition, 1.0)
            logits *= tl.where(logits > 0, 1.0 / scale, scale)  # as vLLM's sampler, to the last bit
        logits -= frequency * counts
        logits -= presence * is_emitted
    return logits


@triton.jit
def _collected(
    result_ptr, zeros, lists, counts, layout, row, step, state, position, tile, inside, offsets, vocab_size,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects the amounts that a row's lists add to a tile, 0, a bias or -inf, in the memory of the result."""
    allowed, bias, min_tokens, bad_words = lists
    num_allowed, num_biases, num_early, num_bad = counts
    first, last = tile * TILE, tl.minimum((tile + 1) * TILE, vocab_size)
    others = tl.where(num_allowed > 0, float("-inf"), 0.0)
    tl.store(result_ptr + offsets, zeros + others, mask=inside)
    tl.debug_barrier()
    if allowed is not None:
        _put(result_ptr, allowed[1] + state * allowed[2], num_allowed, 0.0, first, last, BLOCK)
        tl.debug_barrier()
    if bias is not None:
        _add(result_ptr, bias[1] + state * bias[3], bias[2] + state * bias[4], num_biases, first, last, BLOCK)
        tl.debug_barrier()
    if min_tokens is not None:
        _put(result_ptr, min_tokens[1] + state * min_tokens[3], num_early, float("-inf"), first, last, BLOCK)
    if bad_words is not None:
        drafts_ptr = layout.draft_token_ids + row
        _put_after(result_ptr, bad_words, num_bad, state, drafts_ptr, step, position, first, last, BLOCK)
    tl.debug_barrier()
    added = tl.load(result_ptr + offsets, mask=inside, other=0.0)
    tl.debug_barrier()
    return added


@triton.jit
def _adjust_kernel(
    # [num_logits, vocab_size] float32
    result_ptr,
    target,
    layout,
    # Edits without penalties: each has tensors, then strides
    lists,
    penalties,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONLY_LAST: tl.constexpr,
):
    tile, step, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(layout.cu_num_logits + request).to(tl.int64)
    end = tl.load(layout.cu_num_logits + request + 1)
    if ONLY_LAST:
        step = end - begin.to(tl.int32) - 1
    row = begin + step
    if row >= end:
        return
    place = row  # in `target.logits`
    if ONLY_LAST:
        place = request.to(tl.int64)
    state = tl.load(layout.idx_mapping + request).to(tl.int64)
    position = tl.load(layout.positions + row)
    words = tile * WORDS + tl.arange(0, WORDS)
    offsets = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside, num_words = offsets < target.vocab_size, tl.cdiv(target.vocab_size, 32)
    logits = tl.load(target.logits + place * target.stride + offsets, mask=inside, other=0.0).to(tl.float32)
    result_ptr += place * target.vocab_size

    allowed, bias, min_tokens, bad_words = lists
    num_allowed, num_biases, num_bad = _length(allowed, state), _length(bias, state), _length(bad_words, state)
    num_early = _length(min_tokens, state)
    if min_tokens is not None:
        num_early = tl.where(position < tl.load(min_tokens[2] + state), num_early, 0)
    if num_allowed + num_biases + num_early + num_bad > 0:
        counts = num_allowed, num_biases, num_early, num_bad
        added = _collected(
            result_ptr, tl.zeros_like(logits), lists, counts, layout, row, step, state, position, tile, inside,
            offsets, target.vocab_size, WORDS * 32, BLOCK,
        )  # fmt: skip
        logits = tl.where(added == float("-inf"), float("-inf"), logits + added)  # also where the logit is NaN

    if penalties is not None:
        drafts = layout.draft_token_ids + begin + 1
        logits = _penalized(logits, penalties, state, drafts, step, offsets, words, num_words, inside)
    tl.store(result_ptr + offsets, logits, mask=inside)


def _with_strides(tensors: Any) -> tuple[Any, ...] | None:
    return None if tensors is None else (*tensors, *(tensor.stride(0) for tensor in tensors if tensor.ndim == 2))


def adjust(logits: torch.Tensor, layout: Layout, edits: Edits, max_num_draft: int, only_last: bool) -> torch.Tensor:
    target, layout = target_of(logits), layout_of(*layout)
    result = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    lists = edits.allowed, edits.bias, edits.min_tokens, edits.bad_words
    num_rows = 1 if only_last else max_num_draft + 1
    _adjust_kernel[triton.cdiv(target.vocab_size, TILE_SIZE), num_rows, len(layout.idx_mapping)](
        result, target, layout, tuple(map(_with_strides, lists)), _with_strides(edits.penalties),
        WORDS=TILE_SIZE // 32, BLOCK=_BLOCK_SIZE, ONLY_LAST=only_last, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return result
