"""A guard: calls one proposer, alone or as a stage of a cascade, so that nothing it does reaches beyond its drafts.

A fault, that is whatever is no valid answer, is counted and logged. Repeated ones switch the proposer off for a while;
those that a request is to blame for cost that request its drafts instead.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.random import mtrand

from vllm_specplugins.draft import DraftBatch, Feedback, Proposer
from vllm_specplugins.isolation.exchange import feedback_for_proposer
from vllm_specplugins.isolation.faults import HANGS, SLOW, CircuitBreaker, Fault, FaultCounters, fault_of, logger
from vllm_specplugins.request_options import SETTINGS

NO_REQUESTS = DraftBatch((), (), np.empty(0, np.int32), ())
T = TypeVar("T")
_Answers = SimpleQueue[Any]
_Jobs = SimpleQueue[tuple[Callable[[], Any], _Answers] | None]


class Guard:
    """See the module.

    Args:
        proposer: the proposer; the guard forgets requests and observes feedback for it, before it next proposes.
        name: for the log.
        health: where its faults are counted.
        budget_ms: longest time of a step. None: as long as it likes.
        in_thread: whether the proposer is called in a thread of its own, where all of its exceptions stop and a call
            that takes longer than the budget is left behind. Otherwise it is called in the engine's: what runs layers
            of the target owns the engine's stream and writes to its KV cache, and must not be left alone with them.
            There KeyboardInterrupt and SystemExit are a signal's, and pass; a call that takes too long is a fault, but
            its result counts.
        ends_process: whether a fault ends the process, for what every tensor-parallel rank runs: the other ranks wait
            in a collective for this one, and vLLM ends them when one of its workers is gone, not when one raises.
    """

    def __init__(
        self,
        proposer: Proposer,
        name: str,
        health: FaultCounters,
        budget_ms: float | None = None,
        *,
        in_thread: bool = False,
        ends_process: bool = False,
    ):
        self.proposer = proposer
        self._health = health
        self._breaker = CircuitBreaker(name, health)
        self._name = name
        self._budget_ms = budget_ms
        self._left_ms = budget_ms or 0.0  # of this step
        self._thread = CallThread() if in_thread else None
        self._ends_process = ends_process
        self._known: set[str] = set()  # requests that the proposer has been told of
        self._to_forget: list[str] = []  # those of them that are gone
        self._set_aside: set[str] = set()  # requests that get no more drafts
        self._feedback: Feedback | None = None  # that it has not been told
        self._started: tuple[DraftBatch, Callable[[], None], float] | None = None  # the turn under way, and since when

    def begin_step(self) -> None:
        """Gives the proposer its time for another step."""
        self._breaker.step += 1
        self._left_ms = self._budget_s * 1000

    def observe(self, feedback: Feedback) -> None:
        """Has the proposer learn this before it next proposes, unless newer feedback has come until then."""
        self._feedback = feedback_for_proposer(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Has the proposer forget these requests before it next proposes, if it has ever heard of them."""
        self._to_forget.extend(request_id for request_id in request_ids if request_id in self._known)
        self._known.difference_update(request_ids)
        self._set_aside.difference_update(request_ids)

    @property
    def has_to_forget(self) -> bool:
        """Whether the proposer holds requests that are gone."""
        return bool(self._to_forget)

    def settle(self) -> None:
        """Has the proposer forget what is gone now, since no step follows for a while."""
        self.take(self._budget_s)
        if self._to_forget:
            self.begin_step()
            self.call(NO_REQUESTS, lambda: None)

    def may_draft(self, request_ids: Sequence[str]) -> list[bool] | None:
        """Whether each request may be drafted for; None if all may."""
        if self._set_aside.isdisjoint(request_ids):
            return None
        return [request_id not in self._set_aside for request_id in request_ids]

    def call(self, batch: DraftBatch, work: Callable[[], T]) -> T | None:
        """What `work` makes of a batch; None where the proposer is switched off, still hangs, or fails now."""
        if not self.can_start:
            return None
        turn, settled = self._turn(batch, work)
        return self._result(self._run(turn, batch.request_ids), batch, settled)

    @property
    def can_start(self) -> bool:
        """Whether the proposer is neither switched off nor at work."""
        is_at_work = self._thread is not None and (self._thread.is_busy or self._started is not None)
        return not (is_at_work or (self._health.switched_off and self._breaker.is_off()))

    def start(self, batch: DraftBatch, work: Callable[[], Any]) -> None:
        """Begins `call` as a step of its own, in the proposer's thread, if it `can_start`."""
        assert self._thread is not None
        self.begin_step()
        turn, settled = self._turn(batch, work)
        self._started = batch, settled, time.perf_counter()
        self._thread.start(lambda: attempt(turn, batch.request_ids))

    def take(self, timeout_s: float = 0.0) -> Any:
        """What came of `start`; None if it failed, or has not returned in this time. Past the budget it hangs."""
        if self._started is None or self._thread is None:
            return None
        batch, settled, began = self._started
        left_s = began + self._budget_s - time.perf_counter()
        try:
            outcome = self._thread.take(max(0.0, min(timeout_s, left_s)))
        except TimeoutError:
            if timeout_s < left_s:
                return None
            outcome = self._hangs()
        self._started = None
        return self._result(outcome, batch, settled)

    def _turn(self, batch: DraftBatch, work: Callable[[], T]) -> tuple[Callable[[], T], Callable[[], None]]:
        """The work, after what the proposer has to be told; and what is to be called when that is over."""
        self._known.update(batch.request_ids)
        to_forget, feedback, self._feedback = tuple(self._to_forget), self._feedback, None
        has_forgotten = threading.Event()

        def turn() -> T:
            if to_forget:
                self.proposer.forget(to_forget)
            has_forgotten.set()
            if feedback is not None and feedback.request_ids:
                self.proposer.observe(feedback)
            return work()

        def settled() -> None:
            if has_forgotten.is_set():
                del self._to_forget[: len(to_forget)]

        return turn, settled

    def _result(self, outcome: T | Fault, batch: DraftBatch, settled: Callable[[], None]) -> T | None:
        settled()
        if isinstance(outcome, Fault):
            self._record(outcome, self._to_blame(outcome, batch))
            return None
        return outcome

    def call_built_in(self, work: Callable[[], T], is_timed: bool) -> T | None:
        """The same of a proposer that is built into the engine, which is told of requests by the engine.

        Args:
            work: runs it.
            is_timed: whether the budget holds for this step; taking in prompts may take longer.
        """
        self.begin_step()
        start = time.perf_counter()
        outcome = self.call(NO_REQUESTS, work)
        ms = (time.perf_counter() - start) * 1000
        if outcome is not None and is_timed and self._budget_ms is not None and ms > self._budget_ms:
            self._record(Fault(SLOW, f"{ms:.0f} ms where {self._budget_ms:.0f} are allowed"), ())
        return outcome

    def _run(self, turn: Callable[[], T], request_ids: Sequence[str]) -> T | Fault:
        if self._thread is None:
            return self._attempt(turn, request_ids)
        start = time.perf_counter()
        try:
            return self._thread.call(lambda: attempt(turn, request_ids), self._left_ms / 1000)
        except TimeoutError:
            return self._hangs()
        finally:
            self._left_ms = max(0.0, self._left_ms - (time.perf_counter() - start) * 1000)

    def _hangs(self) -> Fault:
        return Fault(HANGS, f"no answer within its budget of {self._budget_ms:.0f} ms a step")

    @property
    def _budget_s(self) -> float:
        return (self._budget_ms or 0.0) / 1000

    def _attempt(self, work: Callable[[], T], request_ids: Sequence[str]) -> T | Fault:
        outcome = attempt(work, request_ids, passes=(KeyboardInterrupt, SystemExit))
        if isinstance(outcome, Fault) and self._ends_process:
            logger.error(
                "%s %s (%s) on one of several ranks, which ends them all.", self._name, outcome.kind, outcome.cause
            )
            os._exit(1)  # an orderly end would wait for the other ranks, too
        return outcome

    def _to_blame(self, fault: Fault, batch: DraftBatch) -> list[str]:
        """The request that the proposer names; otherwise all with options that a client made up: if it fails without
        them, too, the next faults count. What runs in the engine's thread is ours, and does not fail at options."""
        if self._thread is None:
            return []
        options = zip(batch.request_ids, batch.options, strict=True)
        own = [request_id for request_id, given in options if given and not SETTINGS.issuperset(given)]
        blamed = [fault.request_id] if fault.request_id in self._known - self._set_aside else own
        return [request_id for request_id in blamed if request_id not in self._set_aside]

    def _record(self, fault: Fault, charged_to: Sequence[str]) -> None:
        self._set_aside.update(charged_to)
        self._breaker.record(fault, charged_to)


def attempt(
    work: Callable[[], T], request_ids: Sequence[str], passes: tuple[type[BaseException], ...] = ()
) -> T | Fault:
    """What `work` returns, or what is wrong with it; only exceptions of `passes` leave."""
    try:
        return work()
    except passes:
        raise
    except BaseException as error:
        return fault_of(error, request_ids)


class CallThread:
    """Runs one function at a time in a daemon thread. The functions must not raise."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._answers: _Answers | None = None  # of the call under way alone: a late answer reaches no other call
        self._random_numbers = np.random.MT19937()
        threading.Thread(target=_work, args=(self._jobs,), name="specplugins-proposer", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether a call that was left behind has not returned yet."""
        return self._answers is not None and self._answers.empty()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """The function's result; TimeoutError if it does not return in time, and then it is left behind."""
        with self._own_random_numbers():
            self.start(function)
            return self.take(timeout_s)  # type: ignore[no-any-return]

    def start(self, function: Callable[[], Any]) -> None:
        """Begins to run a function, which draws from the engine's generators if it draws from the global ones."""
        assert not self.is_busy
        self._answers = SimpleQueue()
        self._jobs.put((function, self._answers))

    def take(self, timeout_s: float) -> Any:
        """The result of the one that was started; TimeoutError if it does not return in time."""
        assert self._answers is not None
        try:
            result = self._answers.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        self._answers = None
        return result

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """The state of NumPy's and torch's global generators is the process's, not a thread's, and tensor-parallel
        ranks draw the same seeds from it each: a proposer on one of them must leave it as it is. A call that was left
        behind draws from the engine's; nobody can help that.
        """
        torch = sys.modules.get("torch")  # who has not loaded it has drawn nothing from it
        state = None if torch is None else torch.default_generator.get_state()
        engines = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._random_numbers)
        try:
            yield
        finally:
            mtrand.set_bit_generator(engines)
            if torch is not None:
                torch.default_generator.set_state(state)


def _work(jobs: _Jobs) -> None:
    process = os.getpid()
    while (job := jobs.get()) is not None:
        function, answers = job
        answer = function()
        if os.getpid() != process:
            os._exit(1)  # the proposer has forked: the copy must not go on as an engine
        answers.put(answer)
        del job, function, answers, answer  # the batch of a step must not live until the next one
