"""Prompt lookup for a batch in Triton; each text is read once. In the first launch, each program compares a tile of a
text with the text's ending, one more token at a time while anything matches, and stores its best match. The second
launch chooses among the tiles of a request and copies. Tiles overlap, so n-grams may cross their borders."""

import torch
import triton
import triton.language as tl

from . import LONGEST_MATCH, Match, References, Texts

# Tokens of a tile; the neighbour has the first _SHARED of them, too.
TILE_SIZE, _NUM_WARPS = 1024, 4
# Of the first launch in all, and of a row at the least: a graph's grid fits any text, and most texts are short.
_PROGRAMS, _MIN_PROGRAMS = 2048, 16
_SHARED = tl.constexpr(16)
_CHUNK = tl.constexpr(128)  # results that the second launch reads at a time
_LONGEST_MATCH = tl.constexpr(LONGEST_MATCH)
_NEAREST = tl.constexpr((1 << 31) - 1)  # less the distance of a match: the lower half of its result

# Not in a tuple, in which Triton would compile variants for alignments and for the number 1.
_NUMBERS = ["min_ngram", "max_ngram", "num_tiles", "num_all_tiles"]
_SLICES = ["slots_ptr", "wanted_ptr"]


@triton.jit
def _expected(distance_ptr, end):
    return tl.maximum(end - tl.load(distance_ptr), 0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SLICES)
def _match_kernel(
    # [R, num_all_tiles] int64: tokens of the match, at most max_ngram, << 32 | its nearness
    best_ptr,
    # Texts, and the stride of its token ids
    texts,
    stride,
    # References
    references,
    # [R]
    slots_ptr,
    wanted_ptr,
    min_ngram,
    max_ngram,
    num_tiles,
    num_all_tiles,
    TILE_SIZE: tl.constexpr,
):
    row, num_programs = tl.program_id(1), tl.num_programs(0)
    if tl.load(wanted_ptr + row) == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    end, text_ptr = tl.load(texts.lengths + slot), texts.token_ids + slot * stride
    steps, lanes = tl.arange(0, _SHARED), tl.arange(0, TILE_SIZE)
    best_ptr += row.to(tl.int64) * num_all_tiles
    # Of the text, then of the reference; no match ends in the last token.
    num_own, num_others = tl.minimum(tl.cdiv(end - 1, TILE_SIZE - _SHARED), num_tiles), 0
    if num_all_tiles > num_tiles:
        num_others = tl.cdiv(tl.load(references.lengths + slot) - 1, TILE_SIZE - _SHARED)
        num_others = tl.minimum(num_others, num_all_tiles - num_tiles)
    for number in range(tl.program_id(0), num_own + num_others, num_programs):
        is_other = number >= num_own
        tile = tl.where(is_other, number - num_own, number)
        places = tile * (TILE_SIZE - _SHARED) - _SHARED + lanes
        # Bounds that are multiples of 16 let loads be wide.
        if is_other:
            num_tokens = tl.load(references.lengths + slot)
            bound = (num_tokens + 15) // 16 * 16
            start = tl.multiple_of(tl.load(references.starts + slot), 16)
            tokens = tl.load(references.token_ids + start + places, mask=(places >= 0) & (places < bound), other=-1)
        else:
            num_tokens = end
            bound = tl.minimum((num_tokens + 15) // 16 * 16, stride)
            tokens = tl.load(text_ptr + places, mask=(places >= 0) & (places < bound), other=-1)
        ending = tl.load(text_ptr + (end - 1 - steps), mask=steps < end, other=-2)
        is_match = (lanes >= _SHARED) & (places < num_tokens - 1) & (tokens == tl.sum(tl.where(steps == 0, ending, 0)))
        lengths = is_match.to(tl.int32)
        longest, n = tl.max(lengths), 1
        while (n < max_ngram) & (longest == n):
            earlier = tl.gather(tokens, tl.maximum(lanes - n, 0), axis=0)
            is_match &= earlier == tl.sum(tl.where(steps == n, ending, 0))
            lengths += is_match.to(tl.int32)
            longest = tl.max(lengths)
            n += 1
        away = places + 1 - _expected(texts.distances + 2 * slot + is_other, end)
        longest = tl.where(longest >= min_ngram, longest, tl.max(tl.where(away == 0, lengths, 0)))
        # The nearest of equals; a match shorter than min_ngram counts only where copying would go on.
        is_best = (lengths == longest) & ((lengths >= min_ngram) | (away == 0))
        nearest = _NEAREST - tl.min(tl.where(is_best, 2 * tl.abs(away) + (away > 0), _NEAREST))
        best = tl.where(longest > 0, longest.to(tl.int64) << 32 | nearest, 0)
        tl.store(best_ptr + tl.where(is_other, num_tiles + tile, tile), best)


@triton.jit
def _best_match(best_ptr, source_ptr, num_tokens, distance_ptr, text_ptr, end, TILE_SIZE: tl.constexpr):
    """Returns the place in the source after the best match of its tiles, and its length; 0 and 0 without one."""
    STEP: tl.constexpr = TILE_SIZE - _SHARED
    num_tiles = (num_tokens - 1 + STEP - 1) // STEP
    best = tl.zeros((_CHUNK,), tl.int64)
    for begin in range(0, num_tiles, _CHUNK):
        tiles = begin + tl.arange(0, _CHUNK)
        best = tl.maximum(best, tl.load(best_ptr + tiles, mask=tiles < num_tiles, other=0))
    largest = tl.max(best)
    away = _NEAREST - (largest & _NEAREST).to(tl.int32)
    place = _expected(distance_ptr, end) + tl.where(away % 2 == 1, away // 2, -(away // 2))
    place = tl.where(largest > 0, place, 0)
    tl.store(distance_ptr, end - place, mask=place > 0)
    steps = tl.arange(0, 32)
    inside = (steps < tl.minimum(place, end)) & (steps < _LONGEST_MATCH)
    tokens = tl.load(source_ptr + (place - 1 - steps), mask=inside, other=-1)
    is_match = inside & (tokens == tl.load(text_ptr + (end - 1 - steps), mask=inside, other=-1))
    return place, tl.min(tl.where(is_match, 32, steps))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SLICES)
def _copy_kernel(
    # tokens, lengths of drafts and of matches, written
    drafts,
    best_ptr,
    texts,
    stride,
    references,
    slots_ptr,
    wanted_ptr,
    num_tiles,
    num_all_tiles,
    K: tl.constexpr,
    LANES: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    row, steps = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    limit = tl.load(wanted_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    tokens, num_draft, length = tl.zeros((LANES,), tl.int32), 0, 0
    if limit > 0:
        best_ptr += row * num_all_tiles
        end, distances_ptr = tl.load(texts.lengths + slot), texts.distances + 2 * slot
        text_ptr = texts.token_ids + slot * stride
        place, length = _best_match(best_ptr, text_ptr, end, distances_ptr, text_ptr, end, TILE_SIZE)
        # A copy from the text may overlap itself, as in LZ77.
        num_draft = tl.where(place > 0, limit, 0)
        tokens = tl.load(text_ptr + place + steps % (end - place), mask=steps < num_draft, other=0)
        if num_all_tiles > num_tiles:
            size, reference_ptr = tl.load(references.lengths + slot), references.token_ids
            reference_ptr += tl.load(references.starts + slot)
            place, longer = _best_match(
                best_ptr + num_tiles, reference_ptr, size, distances_ptr + 1, text_ptr, end, TILE_SIZE
            )
            if longer > length:
                length, num_draft = longer, tl.minimum(limit, size - place)
                tokens = tl.load(reference_ptr + place + steps, mask=steps < num_draft, other=0)
    tl.store(drafts[0] + row * K + steps, tokens, mask=steps < K)
    tl.store(drafts[1] + row, num_draft)
    tl.store(drafts[2] + row, length)


def history_match(
    texts: Texts,
    slots: torch.Tensor,  # [R]
    limits: torch.Tensor,  # [R]
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None,
    longest: int | None,
) -> Match:
    num_rows, room = len(slots), texts.token_ids.shape[1]
    # No match ends in the last token.
    num_tiles = max(1, triton.cdiv(min(room, longest or room) - 1, TILE_SIZE - _SHARED.value))
    num_all_tiles = num_tiles if references is None else 2 * num_tiles
    shapes = (num_rows, max_num_draft), num_rows, num_rows
    token_ids, num_draft, match_length = (slots.new_empty(shape, dtype=torch.int32) for shape in shapes)
    drafts = token_ids, num_draft, match_length
    best = slots.new_empty((num_rows, num_all_tiles), dtype=torch.int64)
    others = references or References(texts.token_ids, texts.lengths, texts.lengths)  # never read
    inputs = texts, texts.token_ids.stride(0), others, slots, limits
    num_programs = min(num_all_tiles, max(_MIN_PROGRAMS, _PROGRAMS // num_rows))
    _match_kernel[(num_programs, num_rows)](
        best, *inputs, min_ngram, max_ngram, num_tiles, num_all_tiles, TILE_SIZE=TILE_SIZE, num_warps=_NUM_WARPS
    )
    _copy_kernel[(num_rows,)](
        drafts, best, *inputs, num_tiles, num_all_tiles, K=max_num_draft,
        LANES=triton.next_power_of_2(max_num_draft), TILE_SIZE=TILE_SIZE, num_warps=1,
    )  # fmt: skip
    return drafts
