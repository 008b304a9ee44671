"""Prompt lookup of a batch: compares the host's version, alone and for tensors, with brute force; Triton gives the same
tokens, and reads the texts once.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a separate process.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE, INTERPRETED, bytes_moved, needs_triton
from vllm_specplugins.kernels.history_match import NO_MATCH, References, Texts, history_match, host

POISON = 7_000_000  # stands wherever no token is


class Row(NamedTuple):
    text: list[int]
    prefix: list[int]
    reference: list[int]
    max_draft: int
    distances: tuple[int, int] = (NO_MATCH, NO_MATCH)


class Drafted(NamedTuple):
    draft: list[int]
    length: int
    distances: tuple[int, int]


def brute_force(row: Row, min_ngram: int, max_ngram: int) -> Drafted:
    """By trying every place of both texts."""
    whole, matched_at, distances = row.text + row.prefix, [], list(row.distances)
    for source, text in enumerate((row.text, row.reference)):
        matches, expected = [], max(0, len(whole) - row.distances[source])
        for place in range(1, len(text)):
            pairs = zip(reversed(text[max(0, place - 31) : place]), reversed(whole), strict=False)
            n = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), min(place, len(whole), 31))
            if n >= min_ngram or (n and place == expected):
                matches.append((-min(n, max_ngram), abs(place - expected), place, n))
        matched_at.append(min(matches)[2:] if matches and row.max_draft else (0, 0))
        if matched_at[-1][1] and not row.prefix:
            distances[source] = len(whole) - matched_at[-1][0]
    (place, length), (there, longer) = matched_at
    if longer > length:
        return Drafted(row.reference[there : there + row.max_draft], longer, tuple(distances))
    copied = whole[place:] * row.max_draft
    return Drafted(copied[: row.max_draft] if length else [], length, tuple(distances))


class Slots(NamedTuple):
    """Rows as arrays: slots lie in another order than rows, some have no row, some share a reference."""

    texts: Texts
    slots: np.ndarray
    references: References
    prefix: np.ndarray
    num_begun: np.ndarray
    max_draft: np.ndarray


def in_slots(rows: list[Row], slack: int) -> Slots:
    room = max(1, *(max(len(row.text), len(row.reference)) for row in rows)) + slack
    num_draft, num_slots = max(1, *(row.max_draft for row in rows)), len(rows) + 3
    slots = np.random.default_rng(len(rows)).permutation(num_slots)[: len(rows)]
    texts, lengths = np.full((num_slots, room), POISON, np.int32), np.full(num_slots, room, np.int32)
    distances = np.full((num_slots, 2), 5, np.int32)
    pool, starts, sizes = [POISON] * 16, np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int32)
    prefix, num_begun = np.full((len(rows), num_draft + 2), POISON, np.int32), np.zeros(len(rows), np.int64)
    known: dict[tuple[int, ...], int] = {}
    for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        texts[slot, : len(row.text)], lengths[slot], distances[slot] = row.text, len(row.text), row.distances
        prefix[i, : len(row.prefix)], num_begun[i] = row.prefix[: num_draft + 2], len(row.prefix)
        if tuple(row.reference) not in known:
            known[tuple(row.reference)] = len(pool)
            pool += row.reference + [POISON] * (-len(row.reference) % 16)
        starts[slot], sizes[slot] = known[tuple(row.reference)], len(row.reference)
    max_draft = np.array([row.max_draft for row in rows], np.int32)
    references = References(np.array(pool, np.int32), starts, sizes)
    return Slots(Texts(texts, lengths, distances), slots, references, prefix, num_begun, max_draft)


def on_host(given: Slots, num_draft: int, min_ngram: int, max_ngram: int) -> tuple[np.ndarray, tuple[Any, Any, Any]]:
    """The host's form, of texts at addresses."""
    (texts, lengths, distances), slots, references, *prefix, max_draft = given
    texts, pool = np.ascontiguousarray(texts), np.ascontiguousarray(references.token_ids)
    known = np.zeros((len(distances), host.NUM_COLUMNS), np.int64)
    known[:, : host.REFERENCE], known[:, host.NUM_TOKENS] = distances, references.lengths
    known[:, host.REFERENCE] = pool.ctypes.data + 4 * references.starts
    out = np.zeros((len(slots), num_draft), np.int32), np.zeros(len(slots), np.int64), np.zeros(len(slots))
    places = texts.ctypes.data + slots * texts.strides[0], lengths[slots].astype(np.int64), slots.astype(np.int64)
    host.history_match(*places, known, *prefix, max_draft.astype(np.int64), min_ngram, max_ngram, *out)
    return known[:, : host.REFERENCE], out


def on_device(
    given: Slots, num_draft: int, min_ngram: int, max_ngram: int, implementation: str, longest: int | None
) -> tuple[np.ndarray, tuple[Any, Any, Any]]:
    """What is called by the front door; without what no row has."""
    device = DEVICE if implementation == "fused" else "cpu"

    def moved(arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        return [torch.tensor(array, device=device) for array in arrays]

    texts, [slots, max_draft] = Texts(*moved(given.texts)), moved((given.slots, given.max_draft))
    references = References(*moved(given.references)) if given.references.lengths.any() else None
    match = history_match(texts, slots, max_draft, num_draft, min_ngram, max_ngram, references, longest, implementation)
    assert all(tensor.dtype == torch.int32 for tensor in match)
    return texts.distances.cpu().numpy(), match


def without_prefix(rows: list[Row]) -> list[Row]:
    return [row._replace(prefix=[]) for row in rows]


def matched(
    rows: list[Row], min_ngram: int, max_ngram: int, implementation: str, slack: int = 5, longest: int | None = None
) -> list[Drafted]:
    """Of an implementation; the host's alone knows drafts that were begun."""
    rows = rows if implementation == "host" else without_prefix(rows)
    given, num_draft = in_slots(rows, slack), max(1, *(row.max_draft for row in rows))
    if implementation == "host":
        distances, match = on_host(given, num_draft, min_ngram, max_ngram)
    else:
        distances, match = on_device(given, num_draft, min_ngram, max_ngram, implementation, longest)
    others = np.delete(distances, given.slots, axis=0)
    assert (others == 5).all(), "slots without a row"
    token_ids, counts, lengths = (array.tolist() for array in match)
    assert all(not any(tokens[num:]) for tokens, num in zip(token_ids, counts, strict=True))
    written = (tuple(distances[slot].tolist()) for slot in given.slots)
    return [
        Drafted(tokens[:num], int(length), chosen)
        for tokens, num, length, chosen in zip(token_ids, counts, lengths, written, strict=True)
    ]


def tokens(limit: int, vocab_size: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab_size - 1), max_size=limit)


def any_rows(limit: int) -> st.SearchStrategy[list[Row]]:
    distance = st.one_of(st.just(NO_MATCH), st.integers(1, limit))
    row = st.builds(
        Row, tokens(limit).filter(bool), tokens(3), tokens(limit), st.integers(0, 6), st.tuples(distance, distance)
    )
    return st.lists(row.map(lambda row: row._replace(prefix=row.prefix[: row.max_draft])), min_size=1, max_size=4)


def random_rows(num_rows: int, longest: int, vocab_size: int, seed: int, limit: int = 5) -> list[Row]:
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
        distances = tuple(rng.integers(1, longest, 2).tolist()) if i % 5 else (NO_MATCH, NO_MATCH)
        max_draft = int(rng.integers(i % 3, limit + 1))
        rows.append(Row(text, random(i % 3), reference if i % 4 else [], max_draft, distances))
    return rows


@settings(max_examples=200, deadline=None)
@given(any_rows(24), st.integers(1, 4), st.integers(0, 4), st.sampled_from([0, 5]))
def test_beside_brute_force(rows: list[Row], min_ngram: int, more: int, slack: int) -> None:
    """Fails if a match may end in the last token or in a begun draft, ties go to the latest, or a tie to a reference;
    if n-grams run around from a text's beginning to its end; if a row that wants nothing, or has a draft begun, changes
    where copying would go on."""
    lengths = min_ngram, min_ngram + more
    for implementation, chosen in (("reference", without_prefix(rows)), ("host", rows)):
        assert matched(chosen, *lengths, implementation, slack) == [brute_force(row, *lengths) for row in chosen]


@pytest.mark.parametrize("vocab_size", [1, 2, 50])
def test_beside_brute_force_longer(vocab_size: int) -> None:
    """Fails if a match's length is not bounded, or by max_ngram, or a copy does not run into itself."""
    for max_ngram in (2, 16):
        rows = random_rows(60, 300, vocab_size, seed=max_ngram, limit=31)
        for implementation, chosen in (("reference", without_prefix(rows)), ("host", rows)):
            assert matched(chosen, 2, max_ngram, implementation) == [brute_force(row, 2, max_ngram) for row in chosen]


def test_blocks() -> None:
    """Fails if the host's blocks lose what lies across their border, or the nearer of two blocks' matches."""
    for vocab_size in (1, 2, 400):
        rows = random_rows(20, 4 * host.BLOCK, vocab_size, seed=vocab_size, limit=31)
        assert matched(rows, 2, 8, "host") == [brute_force(row, 2, 8) for row in rows]


def test_copying_goes_on() -> None:
    """Where two places match alike, the one is copied that goes on as far back as the last, whatever was replaced.
    Fails if the latest or the earliest is taken.
    """
    one, two, three = ([number, 7, 7, 8, 8] for number in (1, 2, 3))
    text = [*one, *two, *three, 5, 7, 7]
    for distance, follows in ((NO_MATCH, 8), (10, 8)):
        [drafted] = matched([Row(text, [], [], 1, (distance, 1))], 2, 8, "host")
        assert drafted.draft == [follows]
    taken = [matched([Row(text, [], [], 3, (distance, 1))], 2, 8, "host")[0].draft[2] for distance in (14, 15, 10, 5)]
    assert taken == [2, 2, 3, 5]


@needs_triton
@settings(max_examples=20, deadline=None)
@given(any_rows(12), st.integers(1, 3), st.integers(0, 2))
def test_equals_reference_in_small(rows: list[Row], min_ngram: int, more: int) -> None:
    """Fails if memory before or after a text counts as a token."""
    assert matched(rows, min_ngram, min_ngram + more, "fused") == matched(
        rows, min_ngram, min_ngram + more, "reference"
    )


@needs_triton
@pytest.mark.parametrize(("vocab_size", "slack"), [(1, 0), (2, 7), (2, 16), (400, 0)])
def test_equals_reference(vocab_size: int, slack: int) -> None:
    """Over tiles and their borders. Fails if n-grams across tiles are cut, a tile counts twice, or one that is farther
    away wins; if a row's end is read past (slack 0: the next row's, or no row's)."""
    for max_ngram in (3, 16):
        rows = random_rows(7, 2500, vocab_size, seed=max_ngram + slack)
        assert matched(rows, 2, max_ngram, "fused", slack) == matched(rows, 2, max_ngram, "reference", slack)


@needs_triton
@pytest.mark.parametrize("end", [1006, 1007, 1008, 1009, 1015, 1023, 1024, 2016, 2017])
def test_borders(end: int) -> None:
    """Tests a match at each place near the border of two tiles. Fails if a tile has one token less of its neighbour."""
    fill = list(range(1000, 1000 + 2100))
    needle = list(range(16))
    text = [*fill[: end - 16], *needle, *fill[end:], *needle]
    row = Row(text, [], [], 3)
    assert matched([row], 2, 16, "fused")[0][:2] == (fill[end : end + 3], 16)
    other = Row([7, *needle], [], text[:-3], 3)
    assert matched([other], 2, 16, "fused", longest=2200)[0][:2] == (fill[end : end + 3], 16)


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
