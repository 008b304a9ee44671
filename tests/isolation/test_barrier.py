"""Tests the fault barrier alone; tests/engine/test_faults.py tests it in a running engine."""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hostile import HANGS, HOSTILE, RAISED, VOCAB_SIZE, HostileProposer, K

from vllm_specplugins.counters import RequestRates
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, RequestFault
from vllm_specplugins.engine.session import Session
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.exchange import for_proposer, rows_of
from vllm_specplugins.isolation.faults import (
    CHARGED,
    FAULT_WINDOW,
    FIRST_PAUSE_S,
    FORGIVEN_AFTER_S,
    LONGEST_PAUSE_S,
    MAX_FAULTS,
)
from vllm_specplugins.stage import StageProposer, stages_of
from vllm_specplugins.structures.arrays import Views, view

GOOD = Draft(np.array([[1, 2], [3, 1 << 20]], np.int32), np.array([2, 1], np.int32))  # past num_draft anything


def batch(*request_ids: str, options: Any = {}) -> DraftBatch:  # noqa: B006
    request_ids = request_ids or ("a", "b")
    rows = range(len(request_ids))
    histories = [np.arange(4, dtype=np.int32) for _ in rows]
    limits = np.full(len(request_ids), 3, np.int32)
    return DraftBatch(list(request_ids), histories, limits, [options.get(name, {}) for name in request_ids])


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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def guard(proposer: Any, budget_ms: float | None = 60_000, clock: Any = None, **more: Any) -> FaultBarrier:
    made = FaultBarrier(proposer, vocab_size=VOCAB_SIZE, max_num_draft=K, time_budget_ms=budget_ms, **more)
    made.guard._breaker.clock = clock or made.guard._breaker.clock
    return made


def step(barrier: FaultBarrier, of: DraftBatch | None = None) -> list[int]:
    lengths: list[int] = barrier.propose(of or batch(), feedback()).num_draft.tolist()
    return lengths


def come_back(barrier: FaultBarrier) -> None:
    """Waits for the abandoned call."""
    thread = barrier.guard._thread
    assert thread is not None
    while thread.is_busy:
        time.sleep(0.01)


def calls_of(guard: Any) -> list[float]:
    """Gets the budget of each call that its thread is given."""
    calls, call = [], guard._thread.call
    guard._thread.call = lambda function, timeout_s: calls.append(timeout_s) or call(function, timeout_s)
    return calls


def raises() -> Any:
    raise RuntimeError("planted")


@pytest.mark.parametrize("budget_ms", [None, 60_000])
def test_good_drafts_pass(budget_ms: float | None) -> None:
    barrier = guard(Scripted(lambda: GOOD), budget_ms)
    draft = barrier.propose(batch(), feedback())
    assert draft.token_ids.tolist() == GOOD.token_ids.tolist() and draft.num_draft.tolist() == [2, 1]
    assert not np.shares_memory(draft.token_ids, GOOD.token_ids), "and are ours"
    counters = barrier.counters
    assert (counters.request_steps, counters.drafts, counters.drafted_tokens, counters.accepted_tokens) == (2, 1, 2, 1)
    assert counters.faults == {}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: each single check, copy and read-only view; an exception that leaves; a fault under another name."""
    put_off: list[Callable[[], Any]] = []  # until this test says so
    later = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(threading, "Timer", lambda seconds, function: put_off.append(function) or later)
    act, kind = HOSTILE[name]
    barrier = guard(HostileProposer(act), budget_ms=400 if kind == HANGS else 60_000)
    given = batch()
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    draft = barrier.propose(given, feedback())
    kept = draft.token_ids.tolist(), draft.num_draft.tolist()
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert repr(given) == repr(batch())
    assert barrier.counters.faults == ({} if kind is None else {kind: 1})
    if kind is not None:
        assert draft.num_draft.tolist() == [0, 0]
    assert len(put_off) == ("later" in name)
    for write in put_off:
        write()
    assert (draft.token_ids.tolist(), draft.num_draft.tolist()) == kept, "a draft of ours does not change"
    assert (draft.num_draft <= 3).all() and (draft.token_ids < VOCAB_SIZE).all()


@pytest.mark.parametrize("method", ["propose", "observe", "forget"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_each_method_may_fail(method: str, error: type[BaseException]) -> None:
    def fail(*args: Any) -> Any:
        raise error

    proposer = Scripted(lambda: GOOD)
    barrier = guard(proposer)
    assert step(barrier) == [2, 1]
    setattr(proposer, method, fail)
    barrier.forget(["a"])
    assert step(barrier) == [0, 0]
    assert barrier.counters.faults == {RAISED: 1}
    delattr(proposer, method)
    assert step(barrier) == [2, 1]


def test_signals_pass_in_the_engines_thread() -> None:
    """Kills: a Ctrl-C that is taken for a fault of a proposer that runs the target; an exception that is not one."""

    class Odd(BaseException): ...

    for error, passes in ((KeyboardInterrupt, True), (SystemExit, True), (Odd, False)):

        def fail(error: type[BaseException] = error) -> Any:
            raise error

        barrier = guard(Scripted(fail), budget_ms=None)
        if passes:
            with pytest.raises(error):
                step(barrier)
        else:
            assert step(barrier) == [0, 0] and barrier.counters.faults == {RAISED: 1}


def test_a_fault_on_one_of_several_ranks_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a fault that is swallowed while other ranks wait in a collective."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        step(guard(Scripted(raises), budget_ms=None, ends_process=True))


def test_logged_once_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    barrier = guard(Scripted(raises))
    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        for _ in range(10):
            assert step(barrier) == [0, 0]
    assert barrier.counters.faults == {RAISED: MAX_FAULTS}
    assert barrier.counters.switched_off
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "RuntimeError: planted" in messages[0] and "opens for 30 s" in messages[1]
    assert barrier.counters.request_steps == 20, "steps count on"


def test_rare_faults_do_not_switch_off() -> None:
    """Kills: faults that are never forgiven."""
    good = [lambda: GOOD] * FAULT_WINDOW
    barrier = guard(Scripted(raises, raises, *good, raises, lambda: GOOD), budget_ms=None)
    for _ in range(FAULT_WINDOW + 4):
        step(barrier)
    assert barrier.counters.faults == {RAISED: 3}
    assert not barrier.counters.switched_off


def test_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    """Kills: switched off for ever; a pause that does not double, has no end, or never shrinks again."""
    clock, proposer = Clock(), Scripted(raises)
    barrier = guard(proposer, None, clock=clock)
    counters = barrier.counters

    def pause_after_faults() -> float:
        for _ in range(MAX_FAULTS):
            assert not counters.switched_off or clock.now > 0
            step(barrier)
        assert counters.switched_off
        num_calls = len(proposer.seen)
        clock.now += counters.pause_s - 1
        assert step(barrier) == [0, 0] and len(proposer.seen) == num_calls, "it is not asked"
        clock.now += 1
        return counters.pause_s

    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        pauses = [pause_after_faults() for _ in range(9)]
    assert pauses == [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(9)] and pauses[-1] == LONGEST_PAUSE_S
    assert counters.times_switched_off == 9 and counters.faults == {RAISED: 9 * MAX_FAULTS}
    assert sum("the circuit breaker closes after" in record.getMessage() for record in caplog.records) == 8
    proposer.steps = [lambda: GOOD]
    assert step(barrier) == [2, 1] and not counters.switched_off
    clock.now += FORGIVEN_AFTER_S
    proposer.steps = [raises]
    assert pause_after_faults() == FIRST_PAUSE_S


def test_a_hang_is_left_behind_and_comes_back() -> None:
    """One hang is one fault, however long; a late answer is thrown away: it belongs to another batch."""
    release = threading.Event()

    def late() -> Draft:
        release.wait()
        return Draft(np.full((2, 2), 7, np.int32), GOOD.num_draft)

    barrier = guard(Scripted(late, lambda: GOOD), budget_ms=300)
    waits = calls_of(barrier.guard)
    for _ in range(10):
        assert step(barrier) == [0, 0]
    assert len(waits) == 1, "only the first step waits"
    assert barrier.counters.faults == {HANGS: 1} and not barrier.counters.switched_off
    release.set()
    come_back(barrier)
    assert barrier.propose(batch(), feedback()).token_ids.tolist() == GOOD.token_ids.tolist()
    assert barrier.counters.faults == {HANGS: 1}


def test_a_proposer_that_forks() -> None:
    """The forked copy ends with the call, and the engine continues. Fails if the copy waits for the engine's next
    step."""
    copies = []

    def forks() -> Draft:
        copies.append(os.fork())
        return GOOD

    barrier = guard(Scripted(forks))
    assert step(barrier) == [2, 1] and barrier.counters.faults == {}
    for _ in range(1000):
        found, status = os.waitpid(copies[0], os.WNOHANG)
        if found:
            break
        time.sleep(0.01)
    else:
        os.kill(copies[0], signal.SIGKILL)
    assert found and os.waitstatus_to_exitcode(status) == 1


def test_an_exception_from_another_thread() -> None:
    """A timer of a class, as of `func_timeout`, raises an exception in its thread, which arrives behind the call's end.
    Kills: a thread that ended for good, so that the class counts as busy and is never asked again."""
    barrier = guard(Scripted(lambda: GOOD))
    assert step(barrier) == [2, 1]
    thread: Any = barrier.guard._thread
    first, hook = thread._thread, threading.excepthook
    threading.excepthook = lambda _: None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(first.ident), ctypes.py_object(TimeoutError))
    assert step(barrier) in ([2, 1], [0, 0])
    first.join(10)
    threading.excepthook = hook
    assert step(barrier) == [2, 1]


def test_an_interrupted_wait_mixes_up_no_answers() -> None:
    """Ctrl-C while the engine waits, and the engine is used again. Kills: an answer that the next call takes."""
    release = threading.Event()
    barrier = guard(Scripted(lambda: release.wait() and None, lambda: GOOD))
    thread = barrier.guard._thread
    assert thread is not None
    call = thread.call

    def interrupted(function: Any, timeout_s: float) -> Any:
        try:
            call(function, 0.05)
        except TimeoutError:
            raise KeyboardInterrupt from None

    thread.call = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        step(barrier)
    thread.call = call  # type: ignore[method-assign]
    assert step(barrier) == [0, 0], "still at work"
    release.set()
    come_back(barrier)
    assert step(barrier) == [2, 1] and barrier.counters.faults == {}


def test_a_class_of_others_with_names_of_ours() -> None:
    """Fails if a cascade's method is called on a custom class without its guard, which ended the engine."""
    proposer: Any = Scripted(lambda: GOOD)
    for name in set(vars(StageProposer)) - set(vars(Scripted)) - {"__abstractmethods__", "_abc_impl"}:
        setattr(proposer, name, raises)
    session = Session(guard(proposer))
    assert session.propose(batch(), feedback()).num_draft.tolist() == [2, 1]
    session.settle()
    assert stages_of(proposer, "0 custom") == [("0 custom", proposer)] and session.totals().stages == {}


def test_forget_comes_before_the_next_propose() -> None:
    """Kills: forgetting in the engine's thread, while a proposer may be at work."""
    proposer = Scripted(lambda: GOOD)
    barrier = guard(proposer)
    step(barrier)
    barrier.forget(["a", "never seen"])
    assert len(proposer.seen) == 2
    step(barrier)
    assert proposer.seen[2:] == [("forget", ["a"]), "observe", "propose"]


def test_forget_survives_a_hang_and_a_pause() -> None:
    release, clock = threading.Event(), Clock()
    proposer = Scripted(lambda: release.wait() and GOOD, raises, raises, lambda: GOOD)
    barrier = guard(proposer, budget_ms=300, clock=clock)
    step(barrier)
    barrier.forget(["a"])
    step(barrier)
    release.set()
    come_back(barrier)
    for _ in range(MAX_FAULTS - 1):
        step(barrier)
    assert proposer.seen.count(("forget", ["a"])) == 1, "it is not repeated once it has been done"
    assert barrier.counters.switched_off
    barrier.forget(["b"])
    clock.now += FIRST_PAUSE_S
    assert step(barrier) == [2, 1]
    assert ("forget", ["b"]) in proposer.seen


def test_state_is_bounded() -> None:
    """Kills: a list of requests to forget that grows where the proposer is not asked: replayed graphs, other ranks,
    hangs, pauses."""
    release = threading.Event()
    barrier = guard(Scripted(lambda: release.wait() and GOOD), budget_ms=50)
    session = Session(barrier)

    def sizes() -> int:
        held = barrier.guard
        return len(held._known) + len(held._to_forget) + len(held._set_aside)

    for index in range(1000):
        barrier.forget([str(index)])
        session.count(feedback())
    assert step(barrier, DraftBatch([], [], np.zeros(0, np.int32), [])) == [] and sizes() == 0, "nobody is asked"
    step(barrier)
    for index in range(1000):  # it hangs
        step(barrier, batch(str(index), str(-index)))
        barrier.forget([str(index), str(-index)])
    assert sizes() == 2
    release.set()


def test_a_pause_is_no_part_of_a_step() -> None:
    """Fails if the feedback of a proposer includes a pause of the engine, or if the pause is subtracted from other
    steps."""
    told = []
    proposer = Scripted(lambda: GOOD)
    proposer.observe = lambda feedback: told.append(feedback.step_ms)  # type: ignore[method-assign]
    session = Session(guard(proposer))
    for paused_ms, step_ms in ((700.0, 900.0), (0.0, 200.0), (500.0, None), (0.0, 200.0)):
        session.paused_ms += paused_ms
        session.propose(batch(), replace(feedback(), step_ms=step_ms))
    assert told == [200.0, 200.0, None, 200.0]


class Picky:
    """Fails when a request with this option is in its batch; drafts token 7 for the others."""

    def __init__(self, fault: Callable[[str], BaseException]):
        self.fault = fault
        self.seen: list[tuple[str, ...]] = []

    def propose(self, batch: DraftBatch) -> Draft:
        self.seen.append(tuple(batch.request_ids))
        for request_id, options in zip(batch.request_ids, batch.options, strict=True):
            if "poison" in options:
                raise self.fault(request_id)
        return Draft(np.full((batch.num_reqs, 1), 7, np.int32), np.ones(batch.num_reqs, np.int32))

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


FAULTS: dict[str, Callable[[str], BaseException]] = {
    "named": lambda request_id: RequestFault(request_id, "bad poison"),
    "not named": lambda request_id: RuntimeError("poisoned"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_clients_fault_is_its_own(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kills: a client that switches a proposer off for everybody, or costs the others more than one step's drafts."""
    proposer = Picky(FAULTS[fault])
    barrier = guard(proposer)
    for index in range(20):
        bad = f"bad{index}"
        options = {bad: {"poison": [1, 2]}, "b": {"max_draft": 3}}
        assert step(barrier, batch("a", bad, "b", options=options)) == [0, 0, 0]
        assert step(barrier, batch("a", bad, "b", options=options)) == [1, 0, 1]
        assert proposer.seen[-1] == ("a", "b")
        assert step(barrier, batch(bad, options=options)) == [0]
        barrier.forget([bad])
    assert barrier.counters.faults == {CHARGED: 20} and not barrier.counters.switched_off
    assert not barrier.guard._set_aside
    assert step(barrier) == [1, 1]


@pytest.mark.parametrize(
    ("error", "charged"),
    [
        (RuntimeError("planted"), 1),
        (RequestFault("a", "again"), 1),
        *((RequestFault(blamed, "not mine"), 0) for blamed in ("unknown", 5, None)),
    ],
)
def test_a_fault_that_is_not_the_clients_counts(error: Exception, charged: int) -> None:
    """Kills: requests as an excuse for a proposer that always fails: with options of their own, or blamed again though
    it is no longer asked for them; a blame of a request that is not in the batch."""

    def fail() -> Any:
        raise error

    barrier, options = guard(Scripted(fail)), {"a": {"mine": 1}} if type(error) is RuntimeError else {}
    for _ in range(MAX_FAULTS + 1):
        step(barrier, batch(options=options))
    assert barrier.counters.faults == ({CHARGED: charged} if charged else {}) | {RAISED: MAX_FAULTS}
    assert barrier.counters.switched_off and len(barrier.guard._set_aside) == charged


def test_histories_of_adapters() -> None:
    """Slices of one view are handed on as they are, and neither they nor what is below can be written to. Kills: a view
    of each at each step; slices of an array that can be written to; rows mixed up.
    """
    matrix = np.arange(12, dtype=np.int32).reshape(3, 4)
    tokens = view(matrix)
    given = for_proposer(replace(batch("a", "b"), token_ids=Views(tokens[row, :3] for row in (2, 0))))
    assert given.token_ids is for_proposer(given).token_ids
    assert [history.tolist() for history in given.token_ids] == [[8, 9, 10], [0, 1, 2]]
    chosen = rows_of(given, [1], given.max_num_draft[1:])
    assert [history.tolist() for history in chosen.token_ids] == [[0, 1, 2]] and type(chosen.token_ids) is Views
    own = for_proposer(batch("a")).token_ids[0]
    for array in (*given.token_ids, *chosen.token_ids, given.token_ids[0].base, own):
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_filter_that_raises(error: type[BaseException]) -> None:
    """A proposer may install a filter for our log. Kills: its exception, which leaves the barrier with the first fault,
    or with the line of totals."""
    logger = logging.getLogger("vllm.specplugins")

    def raises_too(record: logging.LogRecord) -> bool:
        raise error("planted")

    barrier = guard(Scripted(raises))
    session = Session(barrier)
    logger.addFilter(raises_too)
    try:
        for _ in range(MAX_FAULTS + 1):
            assert step(barrier) == [0, 0]
        session._logged_at = -1e9
        if error is ValueError:
            session.log()
    finally:
        logger.removeFilter(raises_too)
    assert barrier.counters.faults == {RAISED: MAX_FAULTS} and barrier.counters.switched_off


def test_options_are_frozen() -> None:
    seen: list[Any] = []

    class Keeps(Scripted):
        def propose(self, batch: DraftBatch) -> Any:
            seen.extend(batch.options)
            return GOOD

    own = {"a": {"deep": [1, {"er": [2]}, np.arange(3)]}}
    assert step(guard(Keeps(lambda: GOOD)), batch(options=own)) == [2, 1]
    deep = seen[0]["deep"]
    assert type(seen[0]) is MappingProxyType and type(deep) is tuple and type(deep[1]) is MappingProxyType
    assert deep[1]["er"] == (2,) and not deep[2].flags.writeable
    own["a"]["deep"].append(9)  # type: ignore[attr-defined]
    assert len(deep) == 3


def test_a_request_that_is_over_is_not_counted_anew() -> None:
    """Feedback may come a step late. Fails if it adds an entry for an ended request, which is never removed."""
    rates = RequestRates()

    def add(**accepted: int) -> None:
        """Of drafts of 4 tokens."""
        counts = np.array(list(accepted.values()), np.int32)
        rates.add(Feedback(list(accepted), np.full(len(counts), 4, np.int32), counts))

    add(a=1, b=4)
    assert rates.take(["a"]) == [0.25]
    add(a=2, b=0)
    assert rates.take(["a", "b"]) == [0.5]
    add(c=4)
    add(a=4)  # another one, much later
    assert rates.take(["a", "c"]) == [1.0, 1.0]
    add()
    assert rates._counts == {} and not rates._over
