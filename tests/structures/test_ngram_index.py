"""The n-gram index against a brute-force oracle; each docstring names mutations that its test kills."""

import doctest
import secrets

import numpy as np
import pytest

from vllm_specplugins.structures import ngram_index
from vllm_specplugins.structures.allowance import ASKING, Allowance
from vllm_specplugins.structures.ngram_index import NgramIndex, Reference


class Growing:
    """An index whose text is appended to, as a request's history is."""

    def __init__(self, min_ngram, max_ngram, reference=(), allowance=None):
        self.index, self.text = NgramIndex(min_ngram, max_ngram, allowance), np.empty(0, np.int32)
        self.reference = None
        if len(reference):
            self.reference = Reference(np.array(reference, np.int32), NgramIndex(min_ngram, max_ngram, allowance))
            assert self.reference.index.take_in(self.reference.text)

    def extend(self, tokens):
        self.text = np.concatenate([self.text, np.array(tokens, np.int32)])
        self.text.flags.writeable = False
        assert self.index.continues(self.text)
        assert self.index.take_in(self.text)

    def draft(self, max_tokens, out=None, begun=()):
        return self.index.draft(self.text, max_tokens, out, begun, self.reference)

    def step(self, tokens, max_tokens, out=None):
        self.extend(tokens)
        return self.draft(max_tokens, out)


def oracle(reference, history, min_ngram, max_ngram, max_tokens, num_remembered=None):
    remembered = len(history) if num_remembered is None else num_remembered
    for n in range(min(max_ngram, len(history)), min_ngram - 1, -1):
        for text, last, repeats in ((history, remembered, max_tokens), (reference, len(reference), 1)):
            for end in range(last - 1, n - 1, -1):  # text[end] follows the match
                if max_tokens and text[end - n : end] == history[-n:]:
                    return (text[end:] * repeats)[:max_tokens], n
    return [], 0


def random_text(rng, vocab_size, num_tokens):
    """Random tokens, many of them copied from earlier text, so that long matches occur in any vocabulary."""
    text = []
    while len(text) < num_tokens:
        run = int(rng.integers(1, 20))
        if len(text) > 2 and rng.random() < 0.33:
            start = int(rng.integers(len(text)))
            text += text[start : start + run]
        else:
            text += rng.integers(0, vocab_size, run).tolist()
    return text[:num_tokens]


def check_random_steps(rng, vocab_size, min_ngram, max_ngram, num_tokens, num_reference):
    reference = random_text(rng, vocab_size, num_reference)
    text = random_text(rng, vocab_size, num_tokens)
    if num_reference and num_tokens:  # the history quotes the reference, its end included
        text[num_tokens // 2 :] = (reference[num_reference // 2 :] + text)[: num_tokens - num_tokens // 2]
    index = Growing(min_ngram, max_ngram, reference)
    position = 0
    while position < num_tokens:
        size = int(rng.integers(0, 7)) if rng.random() < 0.95 else 60
        max_tokens = int(rng.integers(0, 9))
        new = text[position : position + size]
        draft, match_length = index.step(new, max_tokens)
        position += len(new)
        expected = oracle(reference, text[:position], min_ngram, max_ngram, max_tokens)
        assert (draft.tolist(), match_length) == expected, (text[:position], reference, max_tokens)
        more = [*text[position + 1 : position + 1 + int(rng.integers(0, 4))], int(rng.integers(0, vocab_size))]
        draft, match_length = index.draft(max_tokens, begun=more)
        expected = oracle(reference, text[:position] + more, min_ngram, max_ngram, max_tokens, position)
        assert (draft.tolist(), match_length) == expected, (text[:position], more, reference, max_tokens)


@pytest.mark.parametrize("num_reference", [0, 1, 3, 150])
@pytest.mark.parametrize("min_ngram, max_ngram", [(1, 1), (1, 3), (2, 8), (3, 5), (4, 4), (16, 16), (1, 16)])
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, 50, 2**31 - 1])
def test_equals_oracle(vocab_size, min_ngram, max_ngram, num_reference):
    """Kills: entering the last token's n-grams (it finds itself), keeping the first occurrence and not the
    last, not entering the earlier occurrence when an ending repeats, stopping one n short, losing slots on
    growth, not clipping n at the start of the history, entering the reference's last token.
    """
    rng = np.random.default_rng([vocab_size, min_ngram, max_ngram, num_reference])
    check_random_steps(rng, vocab_size, min_ngram, max_ngram, 400, num_reference)


@pytest.mark.parametrize("vocab_size", [2, 5, 1000])
@pytest.mark.parametrize("min_ngram, max_ngram", [(1, 3), (2, 8)])
def test_exact_when_all_hashes_collide(monkeypatch, vocab_size, min_ngram, max_ngram):
    """Kills: trusting the hash without comparing tokens, and slots that do not say which n they are for."""
    monkeypatch.setattr(secrets, "randbits", lambda num_bits: 0)  # times 1: small ids leave the upper bits 0
    rng = np.random.default_rng(vocab_size)
    check_random_steps(rng, vocab_size, min_ngram, max_ngram, 250, 100)
    index = Growing(min_ngram, max_ngram)
    index.extend(random_text(rng, vocab_size, 250))
    assert not np.any(index.index._table >> 36), "the hashes no longer collide: this test tests nothing"


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_periodic_text_fills_the_draft(period):
    """Kills: a draft that stops at the end of the history, and a period that is off by one."""
    text = [10 + i % period for i in range(40)]
    draft, match_length = Growing(1, 4).step(text, 12)
    assert draft.tolist() == [10 + i % period for i in range(40, 52)]
    assert match_length == 4


def test_history_before_reference_and_longer_before_history():
    """Kills: searching the reference first, and taking the latest match instead of the longest."""
    reference = [1, 2, 3, 77]
    assert Growing(1, 4, reference).step([2, 3, 88, 2, 3], 1)[0].tolist() == [88]
    assert Growing(1, 4, reference).step([2, 3, 88, 1, 2, 3], 1)[0].tolist() == [77]


def test_nothing_crosses_the_end_of_the_reference():
    """Kills: no separator, drafting the separator, repeating the reference, a match that nothing follows."""
    assert Growing(1, 4, [5, 6, 7, 8]).step([6], 9)[0].tolist() == [7, 8]  # ends where the reference ends
    assert Growing(1, 4, [5, 6]).step([6], 9)[0].tolist() == []  # nothing follows 6
    assert Growing(2, 4, [5, 6]).step([9, 1, 6, 9], 9)[0].tolist() == []  # 6 | 9 is on the seam
    assert Growing(2, 4, [5, 9, 5, 6]).step([9, 5], 9)[0].tolist() == [6]
    assert Growing(1, 4, [5, 6, 7]).step([5, 6], 9)[1] == 2  # both texts begin here
    assert Growing(1, 4, [5, 6, 7]).step([0, 5, 6], 9)[1] == 2


def test_128k_history():
    """Kills: growth that loses or corrupts slots, and positions that do not fit."""
    rng = np.random.default_rng(0)
    text = random_text(rng, 30_000, 131_072 + 60)
    index = Growing(2, 8)
    index.extend(text[:131_072])
    for position in range(131_072, len(text), 6):
        draft, match_length = index.step(text[position : position + 6], 5)
        if position % 5 == 0:
            assert (draft.tolist(), match_length) == oracle([], text[: position + 6], 2, 8, 5)
    assert index.index.num_bytes < 64 * len(text)


def test_memory_is_one_slot_per_ngram_that_can_tell():
    """Kills: entering n-grams longer than max_ngram, and those whose ending occurred once."""
    text = np.random.default_rng(0).integers(0, 2**31, 10_000)
    once, twice = Growing(2, 16), Growing(2, 2)
    once.extend(text)
    twice.extend(text)
    twice.extend(text)
    assert max(once.index.num_bytes, twice.index.num_bytes) <= 16_384 * 8 + 80  # 10,000 slots, loaded 0.61


def test_draft_goes_into_out():
    """Kills: writing past max_tokens, and returning an array that the next step changes."""
    index, out = Growing(1, 3), np.full(6, -7, np.int32)
    draft, _ = index.step([1, 2, 3, 4, 1], 2, out)
    assert draft.tolist() == [2, 3]
    assert out.tolist() == [2, 3, -7, -7, -7, -7]
    first, _ = index.draft(3)
    index.extend([9, 9, 9])
    assert first.tolist() == [2, 3, 4]
    rows = np.zeros((2, 4), np.int32)
    assert index.draft(4, rows[1])[0].tolist() == rows[1].tolist() == [9, 9, 9, 9]


def test_short_histories_and_empty_requests():
    """Kills: matching fewer than min_ngram tokens, and counting the reference as history."""
    index = Growing(3, 4, [1, 2, 3, 4])
    assert index.draft(5)[1] == 0
    assert index.step([1, 2], 5)[1] == 0
    assert index.step([3], 0)[0].tolist() == []
    assert index.draft(5)[0].tolist() == [4]


def test_which_text_continues():
    """Kills: a text that was cut and grown anew, taken for the one that is held."""
    index, text = NgramIndex(1, 3), np.array([1, 2, 3], np.int32)
    assert index.continues(text) and index.take_in(text) and index.continues(text)
    assert index.continues(np.array([1, 2, 3, 4], np.int32))
    assert not index.continues(np.array([1, 2], np.int32))
    assert not index.continues(np.array([1, 2, 4], np.int32))


@pytest.mark.parametrize("work", [1, 7, 100])
@pytest.mark.parametrize("max_ngram", [2, 8])
def test_in_pieces_as_at_once(monkeypatch, work, max_ngram):
    """However the work is cut, the table is the same in the end, and no piece takes much more than it was granted.

    Kills: a table that is read, or written, while it moves; work that is not counted; an index ready before its time.
    """
    monkeypatch.setattr(secrets, "randbits", lambda num_bits: 12345)
    text = np.array(random_text(np.random.default_rng(work), 50, 3000), np.int32)
    whole = NgramIndex(2, max_ngram)
    assert whole.take_in(text)
    allowance = Allowance(work=0)
    index, num_pieces = NgramIndex(2, max_ngram, allowance), 0
    while not index.take_in(text):
        assert -34 <= allowance.work < ASKING  # more than 0 is left while a larger table waits for that
        assert index.num_left(text) > 0
        allowance.work += work
        num_pieces += 1
    assert index.num_left(text) == 0
    assert set(index._table.tolist()) == set(whole._table.tolist())
    spent = num_pieces * work - allowance.work
    assert 3000 <= spent <= 3000 * 2 * max_ngram
    assert index.draft(text, 5)[0].tolist() == whole.draft(text, 5)[0].tolist()


def test_two_indexes_of_one_allowance():
    """What they hold is counted to the byte, and none grows beyond what they may hold together.

    Kills: a table that is counted twice, or not given back; a bound for each of them.
    """
    rng = np.random.default_rng(0)
    allowance = Allowance(max_bytes=30_000)
    texts = [rng.integers(0, 1000, 3000).astype(np.int32) for _ in range(2)]
    first, second = (NgramIndex(2, 4, allowance) for _ in texts)
    assert first.take_in(texts[0][:500]) and second.take_in(texts[1][:500])
    for index, text in ((first, texts[0]), (second, texts[1])):
        with pytest.raises(MemoryError, match="32768 bytes more than"):
            index.take_in(text)
        assert allowance.num_bytes == first.num_bytes + second.num_bytes <= 30_000
    first.free()
    assert allowance.num_bytes == second.num_bytes
    allowance.max_bytes = 100_000
    assert second.take_in(texts[1])
    assert second.draft(texts[1], 5)[1] == Growing(2, 4).step(texts[1], 5)[1]
    second.free()
    assert allowance.num_bytes == 0


@pytest.mark.parametrize("text", [[-1], [1, -1], [4] * 500 + [-1], [1, -1, 1, 2]])
def test_negative_id(text):
    """Kills: not checking the first or the last new token."""
    index = NgramIndex(1, 3)
    with pytest.raises(ValueError, match=r"text holds the id -1; ids must be >= 0\."):
        index.take_in(np.array(text, np.int32))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: NgramIndex(0, 4), "min_ngram is 0; it must be 1 to max_ngram, 4."),
        (lambda: NgramIndex(5, 4), "min_ngram is 5; it must be 1 to max_ngram, 4."),
        (lambda: NgramIndex(1, 17), "max_ngram is 17; it must be 1 to 16."),
        (lambda: Growing(1, 4).draft(-1), "max_tokens is -1; it must be >= 0."),
        (
            lambda: Growing(1, 4).draft(3, np.empty(2, np.int32)),
            "out has 2 elements; it must have at least max_tokens, 3.",
        ),
    ],
)
def test_errors_name_argument_value_and_range(call, message):
    """Kills: accepting the value."""
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_example_in_docstring():
    """Kills: an example that no longer runs."""
    result = doctest.testmod(ngram_index)
    assert result.attempted >= 3 and result.failed == 0
