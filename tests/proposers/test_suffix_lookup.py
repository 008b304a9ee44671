"""Suffix lookup as a proposer: what it learns, keeps, forgets and takes in; docstrings say when a test fails."""

import os
import sys
import time
from pathlib import Path
from threading import Event, RLock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import ConfigError
from vllm_specplugins.counters import Counters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers import suffix_lookup
from vllm_specplugins.proposers.suffix_lookup import MAX_NEW
from vllm_specplugins.structures.drafts import MIN_LONGER, of_stage
from vllm_specplugins.structures.suffix import store_file

sys.path.append(str(Path(__file__).parent))

from suffix_play import TEXT, K, proposer, serve, step, texts_of, wait_for


def test_learns_what_was_said():
    """The second time the output is known, its first token included, for this tenant alone, unless it is kept out.
    Fails if outputs do not enter the store; if their beginning, or the end of the prompt, does not; if `learn` or the
    tenant is not looked at; if a prompt is taken for output.
    """
    own = proposer()
    assert serve(own, "a", TEXT, 100, {"learn": False}) == 0
    assert serve(own, "b", TEXT, 100) == 0
    assert serve(own, "c", TEXT, 100) > 150
    assert serve(own, "d", TEXT, 100, {"tenant": b"other"}) == 0
    assert serve(own, "e", TEXT[:90], 50) == 0, "that was a prompt"


def test_keeps_its_store(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A store outlives its process, without any end of that; not for another tokenizer, nor a reset. Fails if an output
    waits for the next request, or for a save; if the file is not loaded, or its mark not looked at; if it is not let go
    of; if a reset leaves what it holds.
    """
    path = tmp_path / "store"
    own = proposer(store_path=str(path))
    assert serve(own, "a", TEXT, 100) == 0
    wait_for(lambda: len(texts_of(path)) == 1)
    other = proposer(store_path=str(path))
    assert "in use by another engine" in caplog.text
    assert serve(other, "c", TEXT, 100) > 150, "it may read"
    other.close()
    step(own, {"unfinished": TEXT[:50]})
    own.close()
    own.close()
    assert [len(text.tokens) for text in texts_of(path)] == [208, 9]
    own = proposer(store_path=str(path))
    assert serve(own, "c", TEXT, 100) > 150
    own.reset_store()
    assert texts_of(path) == []
    assert serve(own, "d", TEXT, 100) == 0
    own.close()
    caplog.clear()
    other = proposer(tokenize=lambda text: [1, *text.encode()], store_path=str(path))
    assert "another tokenizer. The store starts empty" in caplog.text
    assert serve(other, "d", TEXT, 100) == 0
    other.close()
    assert len(texts_of(path, [1])) == 1, "it is replaced"


def test_the_next_server(tmp_path: Path):
    """Started before the last one has ended, it saves once that is over, and loses nothing of the other's. Fails if it
    does not try again, or writes its own store over what the other learned meanwhile.
    """
    path = tmp_path / "store"
    first = proposer(store_path=str(path))
    second = proposer(store_path=str(path))
    wait_for(lambda: second._saver._due_at is None)  # it has tried again, with nothing to save
    serve(second, "a", TEXT, 100)
    serve(first, "b", TEXT + 1, 100)
    first.close()
    wait_for(lambda: len(texts_of(path)) == 2)
    serve(second, "c", TEXT + 2, 100)
    second.close()
    assert [text.tokens[0] for text in texts_of(path)] == [193, 192, 194]


def test_data_parallel_engines_and_other_ranks(tmp_path: Path):
    """Fails if two engines have one file, or a rank that does not draft saves; it takes what rank 0 has read."""
    path = tmp_path / "store"
    second = proposer(store_path=str(path), context={"file_suffix": ".dp1"})
    serve(second, "a", TEXT, 100)
    second.close()
    assert [file.name for file in tmp_path.iterdir()] == ["store.dp1"]
    texts = texts_of(tmp_path / "store.dp1")
    rank_1 = proposer(store_path=str(path), context={"file_suffix": None, "agreed": lambda own: own or texts})
    assert serve(rank_1, "a", TEXT, 100) > 150
    rank_1.close()
    assert not path.exists()


@pytest.mark.parametrize("name", ["fifo", "folder", "a" * 300, "missing/store", "thesis", "loop"])
def test_bad_paths(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """One sentence at the start, and drafts as without a file. Fails if one is waited for, raises, or is replaced."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "thesis").write_text("All happy families are alike")
    own = proposer(store_path=str(tmp_path / name))
    [words] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert words.endswith("saving is tried again.") and str(tmp_path) in words
    serve(own, "a", TEXT, 100)
    assert serve(own, "c", TEXT, 100) > 150
    own.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fifo", "folder", "loop", "thesis"]
    assert (tmp_path / "thesis").read_text() == "All happy families are alike"


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It is said once, tried again, and nothing is lost; then said anew. Fails if the thread ends, a torn text stays
    before what follows, or what could not be written is forgotten."""
    path, is_full = tmp_path / "store", True

    def write_some(descriptor, data, place):
        if not is_full:
            return os.pwrite(descriptor, data, place)
        os.pwrite(descriptor, data[:5], place)
        raise OSError(28, "No space left on device")

    own = proposer(store_path=str(path))
    monkeypatch.setattr(store_file, "os", SimpleNamespace(**{**vars(os), "pwrite": write_some}))
    for number in range(2):
        serve(own, f"a{number}", TEXT + number, 100)
    wait_for(lambda: own.store_stats()["failed_saves"] >= 2)
    assert caplog.text.count("No space left on device") == 1 and texts_of(path) == []
    is_full = False
    wait_for(lambda: len(texts_of(path)) == 2)
    serve(own, "b", TEXT + 2, 100)
    wait_for(lambda: len(texts_of(path)) == 3)
    assert [text.tokens[0] for text in texts_of(path)] == [192, 193, 194]


def test_a_file_stays_in_bounds(tmp_path: Path):
    """It holds what the store holds. Fails if it grows with what was ever said, or a text gets lost."""
    path, rng = tmp_path / "store", np.random.default_rng(0)
    own = proposer(store_path=str(path), store_bytes=1 << 20)
    last = [rng.integers(0, 1000, 600).astype(np.int32) for _ in range(300)]
    for number, text in enumerate(last):
        step(own, {str(number): text[:10]})
        for place in range(50, len(text) + 1, 50):
            step(own, {str(number): text[:place]}, limit=0)
        own.forget([str(number)])
        assert path.stat().st_size < (1 << 20) / 4
    own.save_store()
    held = {text.tokens.tobytes() for text in texts_of(path)}
    assert own.store_stats()["saves"] > 1 and held >= {text[1:].tobytes() for text in last[-15:]}
    own.close()


def test_statistics_and_reset():
    """Fails if a reset leaves texts, or drafts from them, or statistics do not add up."""
    own = proposer()
    serve(own, "a", TEXT, 100, {"tenant": b"x"})
    step(own, {"b": TEXT[:10]})
    held = own.store_stats()
    assert (held["texts"], held["tenants"], held["tokens"]) == (1, 1, 208)
    own.reset_store()
    assert own.store_stats()["tokens"] == 0
    assert serve(own, "c", TEXT, 100, {"tenant": b"x"}) == 0


@pytest.mark.parametrize(("longer", "token"), [(0, 7), (MIN_LONGER, 7), (MIN_LONGER + 1, 3)])
def test_the_longer_match(longer: int, token: int):
    """An output and the request's text both hold the newest two tokens. Fails if the output's is taken where its match
    is not longer by more than MIN_LONGER tokens, or the text's where it is."""
    own = proposer()
    serve(own, "a", np.array([0, 9, 8, 5, 4, 1, 2, 3, 3, 3, 3, 3], np.int32), 1)
    before = [8, 5, 4][3 - longer :]
    assert step(own, {"b": np.array([1, 2, 7, 7, 7, 7, 7, *before, 1, 2], np.int32)})[0][0] == token


def test_continues_drafts():
    """Drafts that were begun are continued, and not remembered. Fails if their tokens enter the text, or do not count,
    or if another request's do."""
    own = proposer()
    history = np.array([4, 5, 6, 7, 8, 9, 1, 2, 5], np.int32)
    batch = DraftBatch(["a", "b"], [history] * 2, np.array([K, K], np.int32), [{}] * 2)

    def behind(prefix, *max_draft):
        ids, counts = np.zeros((2, K), np.int32), np.array([len(tokens) for tokens in prefix], np.int64)
        for row, tokens in enumerate(prefix):
            ids[row, : len(tokens)] = tokens
        drafts = own.draft(batch, of_stage(0, ids, counts, np.ones(2)), np.array(max_draft))
        lengths = drafts.confidence[:, 0].tolist()
        return [(row[:n].tolist(), length) for row, n, length in zip(*drafts[:2], lengths, strict=True)]

    for _ in range(2):  # the first of a step, and another
        assert behind([[6, 7], []], 3, 2) == [([8, 9, 1], 3), ([6, 7], 1)]
        assert [tokens for tokens, _ in behind([[], [6, 7]], 2, 0)] == [[6, 7], []]


def test_reference():
    """Two requests search a text that they share, until they are gone. Fails if it is not searched, or not freed."""
    own = proposer()
    options = {"reference": TEXT}
    history = {"a": np.array([7, 150, 151], np.int32), "b": np.array([9, 250, 251], np.int32)}
    step(own, history, options)
    assert step(own, history, options) == [[*range(152, 157)], [*range(252, 257)]]
    own.forget(["a", "b"])
    assert step(own, {"c": history["a"]}) == [[]]


def test_another_text_of_the_same_name():
    """A request that was preempted, and whose text is now shorter, goes on; what it had emitted is in the store. Fails
    if tokens of the first text are taken for the second's, or learned from, or lost.
    """
    own = proposer()
    step(own, {"a": TEXT[:50]})
    step(own, {"a": np.resize(TEXT, 50 + MAX_NEW + 1)})
    step(own, {"a": TEXT[:20]})
    own.forget(["a"])
    assert own.store_stats()["texts"] == 3 and own.num_bytes() == own.store.num_bytes


class Turn:
    """The lock of a proposer, which notes who waits for it once a call `began`."""

    def __init__(self, began: Event):
        self._lock, self._began, self.is_wanted = RLock(), began, False

    def __enter__(self) -> None:
        self.is_wanted |= self._began.is_set()
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


def test_a_call_that_was_left_behind(monkeypatch: pytest.MonkeyPatch):
    """Compiled code runs beside the engine's thread, and past its budget, until a reset waits for it. Threads take no
    turns here, so this one runs only where that one lets it. Fails if compiled code holds the interpreter's lock, or if
    the ring is cleared or written to while it is being read.
    """
    own = proposer(store_bytes=1 << 24)
    for number in range(20):
        step(own, {str(number): np.random.default_rng(number).integers(0, 3, 2_000).astype(np.int32)}, {"tenant": b"x"})
        own.forget([str(number)])
    own.store.work()
    states, began, compiled, ends = [], Event(), suffix_lookup.draft_step, [False]
    own._lock = turn = Turn(began)

    def slow(*arguments: Any) -> None:
        states.append(arguments[-1][-1].copy())
        began.set()
        until = time.monotonic() + 60
        while not (turn.is_wanted or ends[0]) and time.monotonic() < until:
            compiled(*arguments)
        compiled(*arguments)
        states.append(arguments[-1][-1].copy())

    monkeypatch.setattr(suffix_lookup, "draft_step", slow)
    names = [f"new {number}" for number in range(20)]
    histories = [np.resize(np.array([0, 1, 2, 1], np.int32), 2_000)] * len(names)
    batch = DraftBatch(names, histories, np.full(len(names), K, np.int32), [{"tenant": b"x"}] * len(names))
    guard, interval_s = Guard(own, "It", Counters(), 1.0, in_thread=True), sys.getswitchinterval()
    guard.begin_step()
    sys.setswitchinterval(1000)
    try:
        assert guard.call(batch, lambda: own.propose(batch)) is None and began.wait(60)
        assert len(states) == 1, "this thread ran, too"
        own.reset_store()
    finally:
        sys.setswitchinterval(interval_s)
        ends[0] = True
    assert len(states) == 2 and np.array_equal(*states), "the ring was as it had been"
    assert own.store_stats()["texts"] == 0
    own.close()


def test_work_of_a_step():
    """Outputs enter the store by pieces. Fails if they are entered at once, or not at all while nobody is served."""
    own, rng = proposer(), np.random.default_rng(0)
    for place in range(10, 3000, 50):
        step(own, {"a": np.resize(TEXT, place)}, limit=0)
    own.forget(["a"])
    assert own.store.has_work
    for number in range(20):
        step(own, {f"b{number}": rng.integers(0, 1000, 20).astype(np.int32)})
    assert not own.store.has_work


def test_beside_prompt_lookup():
    """A cascade takes one of them. Fails if it takes both, which would keep each text twice."""
    stages = [{"method": "suffix_lookup"}, {"method": "prompt_lookup"}]
    with pytest.raises(ConfigError, match="remove prompt_lookup from stages"):
        parse_config({"method": "cascade", "stages": stages})
