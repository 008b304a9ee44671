"""Prompt lookup of a batch in Triton: the texts are read once, whatever they hold.

A program of the first launch has a tile of a text in registers, shifts it there against the text's ending as long as
anything matches, and leaves its best match; the second chooses among a request's tiles and copies what follows. The
first tokens of a tile are the last of the one before, so that n-grams across tiles are seen whole. R: rows, S: slots.
"""

import torch
import triton
import triton.language as tl

from . import LONGEST_MATCH, Match, Prefix, References, Texts

# Tokens of a tile, four or eight a thread; of them, as many as the longest n-gram has are the neighbour's, too.
TILE_SIZE, _NUM_WARPS = 1024, 4
_SHARED = tl.constexpr(16)
_CHUNK = tl.constexpr(128)  # tiles' results that the second launch reads at a time
_LONGEST_MATCH = tl.constexpr(LONGEST_MATCH)
_NEAREST = tl.constexpr((1 << 31) - 1)  # the lower half of a result is this less how far away its match is

# These stand apart: in a tuple Triton would compile a variant for each alignment of a slice, and for each number 1.
_NUMBERS = ["min_ngram", "max_ngram", "num_tiles", "num_all_tiles", "has_begun", "has_references", "begun_stride"]
_POINTERS = [
    "slots_ptr",
    "wanted_ptr",
    "lengths_ptr",
    "distances_ptr",
    "num_begun_ptr",
    "begun_ptr",
    "starts_ptr",
    "sizes_ptr",
]


@triton.jit
def _own_tokens(text_ptr, size, begun_ptr, places, mask):
    """Tokens of a text and of the draft after it."""
    tokens = tl.load(text_ptr + places, mask=mask & (places < size), other=0)
    return tokens + tl.load(begun_ptr + (places - size), mask=mask & (places >= size), other=0)


@triton.jit
def _expected(distance_ptr, end):
    """Where copying would go on."""
    return tl.maximum(end - tl.load(distance_ptr), 0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _match_kernel(
    # [R, num_all_tiles] int64: tokens of the match, at most max_ngram, << 32 | how near it is
    best_ptr,
    # [S, L] int32, [S] int32, [S, 2] int32
    texts_ptr,
    texts_stride,
    lengths_ptr,
    distances_ptr,
    # [R]
    slots_ptr,
    wanted_ptr,
    # [R, K] int32, [R] int32
    begun_ptr,
    begun_stride,
    num_begun_ptr,
    has_begun,
    # [P] int32, [S] int64, [S] int32
    references_ptr,
    starts_ptr,
    sizes_ptr,
    min_ngram,
    max_ngram,
    num_tiles,
    num_all_tiles,
    TILE_SIZE: tl.constexpr,
):
    """The best match that ends in a tile of a request's own text, or of its reference."""
    tile, row = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted_ptr + row) == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    size = tl.load(lengths_ptr + slot)
    text_ptr = texts_ptr + slot * texts_stride
    lanes = tl.arange(0, TILE_SIZE)
    first = tile * (TILE_SIZE - _SHARED) - _SHARED
    distances_ptr += 2 * slot + (tile >= num_tiles)
    if tile < num_tiles:
        num_tokens = size
        if first + _SHARED >= num_tokens - 1:
            return
        # Of the row's own 16 tokens; bounds that are multiples of 16 let loads be wide.
        bound = tl.minimum((num_tokens + 15) // 16 * 16, texts_stride)
        places = first + lanes
        tokens = tl.load(text_ptr + places, mask=(places >= 0) & (places < bound), other=-1)
    else:
        first -= num_tiles * (TILE_SIZE - _SHARED)
        num_tokens = tl.load(sizes_ptr + slot)
        if first + _SHARED >= num_tokens - 1:
            return
        bound = (num_tokens + 15) // 16 * 16
        places = first + lanes
        start = tl.multiple_of(tl.load(starts_ptr + slot), 16)
        tokens = tl.load(references_ptr + start + places, mask=(places >= 0) & (places < bound), other=-1)
    end = size + tl.load(num_begun_ptr + row) * has_begun
    steps = tl.arange(0, _SHARED)
    inside = steps < end
    ending = _own_tokens(text_ptr, size, begun_ptr + row * begun_stride, end - 1 - steps, inside)
    ending = tl.where(inside, ending, -2)

    places = first + lanes
    is_match = (lanes >= _SHARED) & (places < num_tokens - 1) & (tokens == tl.sum(tl.where(steps == 0, ending, 0)))
    lengths = is_match.to(tl.int32)
    longest, n = tl.max(lengths), 1
    while (n < max_ngram) & (longest == n):
        earlier = tl.gather(tokens, tl.maximum(lanes - n, 0), axis=0)
        is_match &= earlier == tl.sum(tl.where(steps == n, ending, 0))
        lengths += is_match.to(tl.int32)
        longest = tl.max(lengths)
        n += 1
    away = places + 1 - _expected(distances_ptr, end)
    longest = tl.where(longest >= min_ngram, longest, tl.max(tl.where(away == 0, lengths, 0)))
    # Of equals the nearest; if that is nearest which is less than min_ngram, it is where copying would go on.
    is_best = (lengths == longest) & ((lengths >= min_ngram) | (away == 0))
    nearest = _NEAREST - tl.min(tl.where(is_best, 2 * tl.abs(away) + (away > 0), _NEAREST))
    best = tl.where(longest > 0, longest.to(tl.int64) << 32 | nearest, 0)
    tl.store(best_ptr + row.to(tl.int64) * num_all_tiles + tile, best)


@triton.jit
def _best_of(best_ptr, num_tokens, expected, STEP: tl.constexpr):
    """Where a text goes on after the longest match among its tiles, the nearest one among equals; 0: nowhere."""
    num_tiles = (num_tokens - 1 + STEP - 1) // STEP
    best = tl.zeros((_CHUNK,), tl.int64)
    for begin in range(0, num_tiles, _CHUNK):
        tiles = begin + tl.arange(0, _CHUNK)
        best = tl.maximum(best, tl.load(best_ptr + tiles, mask=tiles < num_tiles, other=0))
    found = tl.max(best)
    away = _NEAREST - (found & _NEAREST).to(tl.int32)
    place = expected + tl.where(away % 2 == 1, away // 2, -(away // 2))
    return tl.where(found > 0, place, 0)


@triton.jit
def _match_length(text_ptr, place, own_ptr, size, begun_ptr, end):
    """How many of its tokens before a place are those before the end, counted as far as a match is."""
    steps = tl.arange(0, 32)
    inside = (steps < tl.minimum(place, end)) & (steps < _LONGEST_MATCH)
    tokens = tl.load(text_ptr + (place - 1 - steps), mask=inside, other=-1)
    is_match = inside & (tokens == _own_tokens(own_ptr, size, begun_ptr, end - 1 - steps, inside))
    return tl.min(tl.where(is_match, 32, steps))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _copy_kernel(
    # [R, K], [R], [R] int32
    drafts_ptr,
    num_draft_ptr,
    match_length_ptr,
    best_ptr,
    texts_ptr,
    texts_stride,
    lengths_ptr,
    distances_ptr,
    slots_ptr,
    wanted_ptr,
    begun_ptr,
    begun_stride,
    num_begun_ptr,
    has_begun,
    references_ptr,
    starts_ptr,
    sizes_ptr,
    has_references,
    num_tiles,
    num_all_tiles,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    """A request's draft: what follows its best match."""
    row, steps = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    max_draft = tl.load(wanted_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    size = tl.load(lengths_ptr + slot)
    tokens, num_draft, length = tl.zeros((LANES,), tl.int32), 0, 0
    if max_draft > 0:
        best_ptr += row * num_all_tiles
        distances_ptr += 2 * slot
        num_begun = tl.load(num_begun_ptr + row) * has_begun
        end = size + num_begun
        text_ptr, begun_ptr = texts_ptr + slot * texts_stride, begun_ptr + row * begun_stride
        place = _best_of(best_ptr, size, _expected(distances_ptr, end), TILE_SIZE - _SHARED)
        if place > 0:
            num_draft = max_draft
            length = _match_length(text_ptr, place, text_ptr, size, begun_ptr, end)
            # The copy may overlap itself, as in LZ77.
            places = place + steps % (end - place)
            tokens = _own_tokens(text_ptr, size, begun_ptr, places, steps < num_draft)
            tl.store(distances_ptr, end - place, mask=num_begun == 0)
        if has_references > 0:
            size_there = tl.load(sizes_ptr + slot)
            expected = _expected(distances_ptr + 1, end)
            place = _best_of(best_ptr + num_tiles, size_there, expected, TILE_SIZE - _SHARED)
            if place > 0:
                reference_ptr = references_ptr + tl.load(starts_ptr + slot)
                length_there = _match_length(reference_ptr, place, text_ptr, size, begun_ptr, end)
                tl.store(distances_ptr + 1, end - place, mask=num_begun == 0)
                if length_there > length:
                    length, num_draft = length_there, tl.minimum(max_draft, size_there - place)
                    tokens = tl.load(reference_ptr + place + steps, mask=steps < num_draft, other=0)
    tl.store(drafts_ptr + row * K + steps, tokens, mask=steps < K)
    tl.store(num_draft_ptr + row, num_draft)
    tl.store(match_length_ptr + row, length)


def history_match(
    texts: Texts,
    slots: torch.Tensor,  # [R]
    max_draft: torch.Tensor,  # [R]
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None,
    prefix: Prefix | None,
    longest: int | None,
) -> Match:
    """See the front door."""
    num_rows, room = len(slots), texts.token_ids.shape[1]
    # All tokens but the last, after which no match goes on.
    num_tiles = max(1, triton.cdiv(min(room, longest or room) - 1, TILE_SIZE - _SHARED.value))
    num_all_tiles = num_tiles if references is None else 2 * num_tiles
    match = Match(
        *(slots.new_empty(shape, dtype=torch.int32) for shape in ((num_rows, max_num_draft), num_rows, num_rows))
    )
    best = slots.new_empty((num_rows, num_all_tiles), dtype=torch.int64)
    following = prefix or Prefix(texts.token_ids, texts.lengths)  # never read
    others = references or References(texts.token_ids, slots, texts.lengths)
    inputs = (
        texts.token_ids, texts.token_ids.stride(0), texts.lengths, texts.distances, slots, max_draft,
        following.token_ids, following.token_ids.stride(0), following.num_tokens, int(prefix is not None), *others,
    )  # fmt: skip
    _match_kernel[(num_all_tiles, num_rows)](
        best, *inputs, min_ngram, max_ngram, num_tiles, num_all_tiles, TILE_SIZE=TILE_SIZE, num_warps=_NUM_WARPS
    )  # fmt: skip
    _copy_kernel[(num_rows,)](
        *match, best, *inputs, int(references is not None), num_tiles, num_all_tiles,
        K=max_num_draft, LANES=triton.next_power_of_2(max_num_draft), TILE_SIZE=TILE_SIZE, num_warps=1,
    )  # fmt: skip
    return match
