"""Prompt lookup of a batch: the reference beside the host's n-gram index and beside brute force; in Triton the same
tokens, and one read of the texts.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a process of its own.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specplugins.kernels.history_match import Begun, Match, References, Texts, history_match
from vllm_specplugins.kernels.self_check import Shapes, check_device

from vllm_specplugins.structures.ngram_index import NgramIndex, Reference

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import DEVICE, INTERPRETED, RUNS, bytes_moved, needs_triton, run_interpreted

if RUNS:
    from vllm_specplugins.kernels.history_match import fused

POISON = 7_000_000  # stands wherever no token is


class Row(NamedTuple):
    text: list[int]
    begun: list[int]
    reference: list[int]
    wanted: int


@pytest.mark.skipif(RUNS, reason="is that process")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def brute_force(row: Row, min_ngram: int, max_ngram: int) -> tuple[list[int], int]:
    """The draft and the match's length, by trying every place."""
    whole, best = row.text + row.begun, (0, 0, 0)
    for is_reference, text in enumerate((row.text, row.reference)):
        for end in range(1, len(text)):
            for n in range(min_ngram, min(max_ngram, end, len(whole)) + 1):
                if text[end - n : end] == whole[-n:]:
                    best = max(best, (n, -is_reference, end))
    n, is_reference, end = best
    if n == 0 or row.wanted == 0:
        return [], 0
    if is_reference:
        return row.reference[end : end + row.wanted], n
    for _ in range(row.wanted):
        whole = [*whole, whole[end]]
        end += 1
    return whole[len(whole) - row.wanted :], n


def indexed(row: Row, min_ngram: int, max_ngram: int) -> tuple[list[int], int]:
    """The same of the host's structure."""
    text, other = NgramIndex(min_ngram, max_ngram), NgramIndex(min_ngram, max_ngram)
    history, reference = np.array(row.text, np.int32), np.array(row.reference, np.int32)
    assert text.take_in(history) and other.take_in(reference)
    shared = Reference(reference, other) if row.reference else None
    draft, length = text.draft(history, row.wanted, begun=row.begun, reference=shared)
    return draft.tolist(), length


def matched(
    rows: list[Row], min_ngram: int, max_ngram: int, implementation: str, slack: int = 5, longest: int | None = None
) -> list[tuple[list[int], int]]:
    """Of an implementation. Slots lie in another order than rows, some are nobody's, some share a reference."""
    device = DEVICE if implementation == "fused" else "cpu"
    room = max(1, *(max(len(row.text), len(row.reference)) for row in rows)) + slack
    num_draft, num_slots = max(1, *(row.wanted for row in rows)), len(rows) + 3
    slots = np.random.default_rng(len(rows)).permutation(num_slots)[: len(rows)]
    texts, lengths = np.full((num_slots, room), POISON, np.int32), np.full(num_slots, room, np.int32)
    pool, starts, sizes = [POISON] * 16, np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int32)
    begun, num_begun = np.full((len(rows), num_draft + 2), POISON, np.int32), np.zeros(len(rows), np.int32)
    known: dict[tuple[int, ...], int] = {}
    for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        texts[slot, : len(row.text)], lengths[slot] = row.text, len(row.text)
        begun[i, : len(row.begun)], num_begun[i] = row.begun[: num_draft + 2], len(row.begun)
        if tuple(row.reference) not in known:
            known[tuple(row.reference)] = len(pool)
            pool += row.reference + [POISON] * (-len(row.reference) % 16)
        starts[slot], sizes[slot] = known[tuple(row.reference)], len(row.reference)
    arrays = [torch.from_numpy(array).to(device) for array in (texts, lengths, starts, sizes, begun, num_begun, slots)]
    texts, lengths, starts, sizes, begun, num_begun, slots = arrays
    match = history_match(
        Texts(texts, lengths),
        slots,
        torch.tensor([row.wanted for row in rows], dtype=torch.int32, device=device),
        num_draft,
        min_ngram,
        max_ngram,
        References(torch.tensor(pool, dtype=torch.int32, device=device), starts, sizes)
        if any(row.reference for row in rows)
        else None,
        Begun(begun, num_begun) if any(row.begun for row in rows) else None,
        longest,
        implementation=implementation,
    )
    assert all(tensor.dtype == torch.int32 for tensor in match)
    token_ids, num_draft, length = (tensor.tolist() for tensor in match)
    assert all(not any(tokens[num:]) for tokens, num in zip(token_ids, num_draft, strict=True))
    return [(tokens[:num], n) for tokens, num, n in zip(token_ids, num_draft, length, strict=True)]


def tokens(most: int, vocab_size: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab_size - 1), max_size=most)


def any_rows(most: int) -> st.SearchStrategy[list[Row]]:
    row = st.builds(Row, tokens(most).filter(bool), tokens(3), tokens(most), st.integers(0, 6))
    return st.lists(row.map(lambda row: row._replace(begun=row.begun[: row.wanted])), min_size=1, max_size=4)


def random_rows(num_rows: int, longest: int, vocab_size: int, seed: int, most: int = 5) -> list[Row]:
    """Texts of all lengths up to the longest; tokens begun and references in some of them."""
    rng = np.random.default_rng(seed)

    def random(length: int) -> list[int]:
        return rng.integers(0, vocab_size, length).tolist()

    rows = []
    for i in range(num_rows):
        text, reference = random(int(rng.integers(1, longest + 1))), random(int(rng.integers(longest + 1)))
        if i % 2:  # ends as it went on somewhere
            text = [*text, *text[len(text) // 3 :][: int(rng.integers(1, 20))]][-longest:]
        if i % 4 == 2:
            reference = [*reference, *text[-int(rng.integers(1, 20)) :], *random(3)][-longest:]
        rows.append(Row(text, random(i % 3), reference if i % 4 else [], int(rng.integers(i % 3, most + 1))))
    return rows


@settings(max_examples=200, deadline=None)
@given(any_rows(24), st.integers(1, 4), st.integers(0, 4), st.sampled_from([0, 5]))
def test_reference(rows: list[Row], min_ngram: int, more: int, slack: int) -> None:
    """Fails if a match may end in the last token or in a begun draft, ties go to the first, or a tie to a reference;
    if n-grams run around from a text's beginning to its end."""
    found = matched(rows, min_ngram, min_ngram + more, "reference", slack)
    assert found == [brute_force(row, min_ngram, min_ngram + more) for row in rows]
    assert found == [indexed(row, min_ngram, min_ngram + more) for row in rows]


@pytest.mark.parametrize("vocab_size", [1, 2, 50])
def test_beside_the_index(vocab_size: int) -> None:
    """Longer texts. Fails if an n-gram's length is not bounded, or a copy does not run into itself."""
    for max_ngram in (2, 16):
        rows = random_rows(60, 300, vocab_size, seed=max_ngram)
        assert matched(rows, 2, max_ngram, "reference") == [indexed(row, 2, max_ngram) for row in rows]


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2), (1, 17)])
def test_lengths(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 to 16"):
        matched([Row([1], [], [], 1)], *lengths, "reference")


@needs_triton
@settings(max_examples=20, deadline=None)
@given(any_rows(12), st.integers(1, 3), st.integers(0, 2))
def test_equals_reference_in_small(rows: list[Row], min_ngram: int, more: int) -> None:
    """Fails if what stands before a text or behind it is taken for a token."""
    assert matched(rows, min_ngram, min_ngram + more, "fused") == matched(
        rows, min_ngram, min_ngram + more, "reference"
    )


@needs_triton
@pytest.mark.parametrize(("vocab_size", "slack"), [(1, 0), (2, 7), (2, 16), (400, 0)])
def test_equals_reference(vocab_size: int, slack: int) -> None:
    """Over tiles and their borders. Fails if n-grams across tiles are cut, a tile counts twice, or an earlier tile
    wins; if a row's end is read past (slack 0: the next row's, or nobody's)."""
    for max_ngram in (3, 16):
        rows = random_rows(7, 2500, vocab_size, seed=max_ngram + slack)
        assert matched(rows, 2, max_ngram, "fused", slack) == matched(rows, 2, max_ngram, "reference", slack)


@needs_triton
@pytest.mark.parametrize("end", [1006, 1007, 1008, 1009, 1015, 1023, 1024, 2016, 2017])
def test_borders(end: int) -> None:
    """A match at each place beside the border of two tiles. Fails if a tile has a token less of its neighbour's."""
    fill = list(range(1000, 1000 + 2100))
    needle = list(range(16))
    text = [*fill[: end - 16], *needle, *fill[end:], *needle]
    row = Row(text, [], [], 3)
    assert matched([row], 2, 16, "fused") == [(fill[end : end + 3], 16)]
    other = Row([7, *needle], [], text[:-3], 3)
    assert matched([other], 2, 16, "fused", longest=2200) == [(fill[end : end + 3], 16)]


@needs_triton
def test_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the check of a device finds fault with what is right, or misses one token of one request."""
    shapes = Shapes(100, torch.float32, max_num_draft=3, samples=False, block=False, looks_up=True)
    assert [finding.problem for finding in check_device(torch.device(DEVICE), shapes, "lookup")] == [""]
    sound = fused.history_match

    def planted(*arguments: object) -> Match:
        match = sound(*arguments)
        match.token_ids[3, 1] += 1
        return match

    monkeypatch.setattr(fused, "history_match", planted)
    assert [finding.problem for finding in check_device(torch.device(DEVICE), shapes, "lookup")] != [""]


@pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter")
@pytest.mark.parametrize("kind", ["random", "one token", "period of 3"])
def test_bytes_moved(kind: str) -> None:
    """In reads of the texts, whatever they hold. Fails if matches are followed in memory."""
    vocab_size = {"random": 30_000, "one token": 1, "period of 3": 3}[kind]
    text = (np.arange(9_000) % vocab_size).tolist()
    if kind == "random":
        text = np.random.default_rng(0).integers(0, vocab_size, 9_000).tolist()
    rows = [Row(text, [], [], 5), Row(text[:5_000], [], text, 5)]
    with bytes_moved() as moved:
        matched(rows, 2, 16, "fused")
    share = moved["all"] / (4 * sum(len(row.text) + len(row.reference) for row in rows))
    print(f"history_match, {kind}: {share:.3f}")
    assert share <= 1.15
