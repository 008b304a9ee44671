"""The fault barrier alone; tests/engine/test_faults.py has it in a running engine."""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.proposers.barrier import FAULT_WINDOW, MAX_FAULTS, FaultBarrier

GOOD = Draft(np.array([[1, 2], [3, 0]], np.int32), np.array([2, 1], np.int32))


def batch() -> DraftBatch:
    history = np.arange(4, dtype=np.int32)
    return DraftBatch(["a", "b"], [history, history], np.array([3, 3], np.int32), [{}, {}])


def feedback(num_draft: int = 2, num_accepted: int = 1) -> Feedback:
    return Feedback(["a", "b"], np.array([num_draft, 0], np.int32), np.array([num_accepted, 0], np.int32))


class Scripted:
    """A proposer whose steps run the given functions, in turn, the last one for ever."""

    def __init__(self, *steps: Callable[[], Any]):
        self.steps = list(steps)
        self.seen: list[Any] = []

    def propose(self, batch: DraftBatch) -> Any:
        self.seen.append("propose")
        return (self.steps.pop(0) if len(self.steps) > 1 else self.steps[0])()

    def observe(self, feedback: Feedback) -> None:
        self.seen.append("observe")

    def forget(self, request_ids: Any) -> None:
        self.seen.append(("forget", list(request_ids)))


def guard(proposer: Any, budget_ms: float | None = 2000) -> FaultBarrier:
    return FaultBarrier(proposer, vocab_size=10, max_num_draft=3, time_budget_ms=budget_ms)


def raises() -> Any:
    raise RuntimeError("planted")


@pytest.mark.parametrize("budget_ms", [None, 2000])
def test_good_drafts_pass(budget_ms: float | None) -> None:
    barrier = guard(Scripted(lambda: GOOD), budget_ms)
    assert barrier.propose(batch(), feedback()) is GOOD
    counters = barrier.counters
    assert (counters.request_steps, counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (
        2,
        1,
        2,
        1,
    )
    assert counters.faults == {}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [[1]],
        Draft(GOOD.token_ids[:1], GOOD.num_draft),
        Draft(GOOD.token_ids, GOOD.num_draft[:1]),
        Draft(GOOD.token_ids[0], GOOD.num_draft),
        Draft(GOOD.token_ids.astype(np.int64), GOOD.num_draft),
        Draft(GOOD.token_ids, GOOD.num_draft.astype(np.float32)),  # type: ignore[arg-type]
        Draft(GOOD.token_ids.tolist(), GOOD.num_draft),  # type: ignore[arg-type]
        Draft(GOOD.token_ids, np.array([3, 1], np.int32)),
        Draft(GOOD.token_ids, np.array([-1, 1], np.int32)),
        Draft(np.ones((2, 4), np.int32), GOOD.num_draft),
        Draft(np.array([[1, 10], [3, 0]], np.int32), GOOD.num_draft),
        Draft(np.array([[1, -1], [3, 0]], np.int32), GOOD.num_draft),
    ],
)
def test_nonsense_is_dropped(bad: Any) -> None:
    """Kills: each single check of a draft's type, shape, lengths and ids."""
    barrier = guard(Scripted(lambda: bad))
    draft = barrier.propose(batch(), feedback())
    assert draft.num_draft.tolist() == [0, 0]
    assert barrier.counters.faults == {"returned nonsense": 1}


def test_what_stands_past_num_draft_is_ignored() -> None:
    draft = Draft(np.array([[1, 999], [-7, 999]], np.int32), np.array([1, 0], np.int32))
    assert guard(Scripted(lambda: draft)).propose(batch(), feedback()) is draft


def test_logged_once_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    barrier = guard(Scripted(raises))
    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        for _ in range(10):
            assert barrier.propose(batch(), feedback()).num_draft.tolist() == [0, 0]
    assert barrier.counters.faults == {"raised": MAX_FAULTS}
    assert barrier.counters.switched_off
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "RuntimeError: planted" in messages[0] and "switched off" in messages[1]
    assert barrier.counters.request_steps == 20, "steps count on"


def test_rare_faults_do_not_switch_off() -> None:
    """Kills: faults that are never forgiven."""
    good = [lambda: GOOD] * FAULT_WINDOW
    barrier = guard(Scripted(raises, raises, *good, raises, lambda: GOOD), budget_ms=None)
    for _ in range(FAULT_WINDOW + 4):
        barrier.propose(batch(), feedback())
    assert barrier.counters.faults == {"raised": 3}
    assert not barrier.counters.switched_off


def test_a_hang_is_left_behind_and_comes_back() -> None:
    """A late answer is thrown away: it belongs to another batch."""

    def late() -> Draft:
        time.sleep(0.8)
        return Draft(np.full((2, 2), 7, np.int32), GOOD.num_draft)

    barrier = guard(Scripted(late, lambda: GOOD), budget_ms=200)
    start = time.perf_counter()
    assert barrier.propose(batch(), feedback()).num_draft.tolist() == [0, 0]
    assert barrier.propose(batch(), feedback()).num_draft.tolist() == [0, 0], "still hanging"
    assert time.perf_counter() - start < 0.6, "the second step must not wait"
    time.sleep(1.0)
    assert barrier.propose(batch(), feedback()) is GOOD
    assert barrier.counters.faults == {"hangs": 2}


def test_forget_comes_before_the_next_propose() -> None:
    """Kills: forgetting in the engine's thread, while a proposer may be at work; or losing it to a fault."""
    proposer = Scripted(lambda: GOOD)
    barrier = guard(proposer)
    barrier.forget(["old"])
    assert proposer.seen == []
    barrier.propose(batch(), feedback())
    assert proposer.seen == [("forget", ["old"]), "observe", "propose"]


def test_forget_survives_a_hang() -> None:
    def late() -> Draft:
        time.sleep(0.8)
        return GOOD

    proposer = Scripted(late, lambda: GOOD)
    barrier = guard(proposer, budget_ms=200)
    barrier.propose(batch(), feedback())
    barrier.forget(["old"])
    barrier.propose(batch(), feedback())
    time.sleep(1.0)
    barrier.propose(batch(), feedback())
    assert ("forget", ["old"]) in proposer.seen


def test_empty_batch_is_not_proposed_for() -> None:
    proposer = Scripted(raises)
    barrier = guard(proposer)
    empty = DraftBatch([], [], np.zeros(0, np.int32), [])
    assert barrier.propose(empty, Feedback([], np.zeros(0, np.int32), np.zeros(0, np.int32))).num_draft.shape == (0,)
    assert proposer.seen == []
