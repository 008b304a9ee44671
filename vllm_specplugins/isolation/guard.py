"""Calls one proposer, alone or as a stage of a cascade. The guard turns exceptions, late answers and invalid answers
into missing drafts. Repeated faults switch the proposer off for a while. If a request caused the fault, only that
request loses its drafts."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from vllm_specplugins.draft import DraftBatch, Feedback, Int32Array, Proposer
from vllm_specplugins.isolation.call_thread import CallThread
from vllm_specplugins.isolation.exchange import feedback_for_proposer
from vllm_specplugins.isolation.faults import DID, HANGS, SLOW, CircuitBreaker, Fault, FaultCounters, fault_of, logger
from vllm_specplugins.isolation.histories import Histories
from vllm_specplugins.request_options import SETTINGS

NO_REQUESTS = DraftBatch((), (), np.empty(0, np.int32), ())
MAX_ENDS = 256  # maximum number of texts that wait for a proposer that is switched off
Texts = Mapping[str, Int32Array]  # whole texts of ended requests, by id
NO_TEXTS: Texts = {}
T = TypeVar("T")


class Guard:
    """Calls one proposer, and passes feedback and ended requests to it before its next call.

    Args:
        budget_ms: time limit of the proposer in one step; None: no limit.
        in_thread: True calls the proposer in a thread, stops all of its exceptions and abandons a call that exceeds the
            budget. False calls it in the engine's thread, since a proposer that runs layers of the target uses the
            engine's stream and KV cache, and cannot be abandoned. There KeyboardInterrupt and SystemExit come from a
            signal and pass through. A call that exceeds the budget counts as a fault, but its result is used.
        ends_process: a fault ends the process. This is for proposers that every tensor-parallel rank runs: the other
            ranks wait for this one in a collective, and vLLM ends them when a worker exits, not when it raises.
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
        self._left_ms = budget_ms or 0.0  # that remain of this step
        self._thread = CallThread() if in_thread else None
        self._ends_process = ends_process
        # The memory that a class of another package sees.
        self._histories = None if type(proposer).__module__.startswith("vllm_specplugins.") else Histories()
        self._known: set[str] = set()  # requests that the proposer has seen
        self._to_forget: list[str] = []  # seen requests that have ended
        self.reads_ends: bool = getattr(proposer, "reads_ends", callable(getattr(proposer, "finish", None)))
        self._tenants: dict[str, bytes] = {}  # of the known requests, for `finish`
        self._ends = deque[tuple[str, Int32Array, bytes]](maxlen=MAX_ENDS)  # arguments of `finish`
        self._set_aside: set[str] = set()  # requests that caused a fault
        self._feedback: Feedback | None = None  # not yet passed to the proposer
        self._started: tuple[DraftBatch, Callable[[], None], float] | None = None  # by `start`: batch, clean-up, time

    def begin_step(self) -> None:
        self._breaker.step += 1
        self._left_ms = self._budget_s * 1000

    def observe(self, feedback: Feedback) -> None:
        """Stores feedback for the proposer's next call; newer feedback replaces it."""
        self._feedback = feedback_for_proposer(feedback)

    def forget(self, request_ids: Sequence[str], texts: Texts = NO_TEXTS) -> None:
        """Makes the proposer finish and forget these requests before its next call, if it has seen them."""
        for request_id in request_ids if self.reads_ends else ():
            if request_id in texts:
                self.end(request_id, texts[request_id])
        if self._histories is not None:
            self._histories.forget(request_ids)
        self._to_forget.extend(request_id for request_id in request_ids if request_id in self._known)
        self._known.difference_update(request_ids)
        for request_id in request_ids if self._tenants else ():
            self._tenants.pop(request_id, None)
        self._set_aside.difference_update(request_ids)

    def end(self, request_id: str, token_ids: Int32Array) -> None:
        """Stores the whole text of an ended request for the proposer's next call."""
        if self.reads_ends and request_id in self._known:
            self._ends.append((request_id, token_ids.copy(), self._tenants.get(request_id, b"")))

    @property
    def has_to_forget(self) -> bool:
        return bool(self._to_forget)

    def settle(self) -> None:
        """Makes the proposer forget ended requests now, since no step may follow for a while."""
        self.take(self._budget_s)
        if self._to_forget:
            self.begin_step()
            self.call(NO_REQUESTS, lambda: None)

    def may_draft(self, request_ids: Sequence[str]) -> list[bool] | None:
        """Returns whether each request may have a draft; None if all may."""
        if self._set_aside.isdisjoint(request_ids):
            return None
        return [request_id not in self._set_aside for request_id in request_ids]

    def shown(self, batch: DraftBatch, rows: Sequence[int]) -> DraftBatch:
        """Returns a batch with the data of only these rows; a class of another package may write to its arrays."""
        return batch if self._histories is None else self._histories.batch(batch, rows)

    def call(self, batch: DraftBatch, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`; None if the proposer is switched off, still busy, or fails."""
        if not self.can_start:
            return None
        turn, settled = self._turn(batch, work)
        return self._result(self._run(turn, batch.request_ids), batch, settled)

    @property
    def can_start(self) -> bool:
        is_busy = self._thread is not None and (self._thread.is_busy or self._started is not None)
        return not (is_busy or (self._health.switched_off and self._breaker.is_off()))

    def start(self, batch: DraftBatch, work: Callable[[], Any]) -> None:
        """Starts a `call` with a full budget in the proposer's thread; requires `can_start`."""
        assert self._thread is not None
        self.begin_step()
        turn, settled = self._turn(batch, work)
        self._started = batch, settled, time.perf_counter()
        self._thread.start(lambda: attempt(turn, batch.request_ids))

    def take(self, timeout_s: float = 0.0) -> Any:
        """Returns the result of `start`; None if the call failed or has not returned after `timeout_s`."""
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
        """Returns a function that delivers pending feedback and ended requests and then does the work, and a clean-up
        to call afterwards."""
        self._known.update(batch.request_ids)
        if self.reads_ends:
            self._tenants.update(zip(batch.request_ids, batch.tenants, strict=True))
        to_forget, feedback, self._feedback = tuple(self._to_forget), self._feedback, None
        has_forgotten = threading.Event()

        def turn() -> T:
            while self._ends:
                self.proposer.finish(*self._ends.popleft())  # type: ignore[attr-defined]
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

    def call_in_engine(self, work: Callable[[], T], is_timed: bool) -> T | None:
        """`call` for a drafter that the engine runs. The budget applies only if `is_timed`, since prompts may take
        longer."""
        self.begin_step()
        start = time.perf_counter()
        outcome = self.call(NO_REQUESTS, work)
        ms = (time.perf_counter() - start) * 1000
        if outcome is not None and is_timed and self._budget_ms is not None and ms > self._budget_ms:
            self._record(Fault(SLOW, f"{ms:.0f} ms, more than time_budget_ms {self._budget_ms:.0f}"), ())
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
        return Fault(HANGS, f"more than time_budget_ms {self._budget_ms:.0f}")

    @property
    def _budget_s(self) -> float:
        return (self._budget_ms or 0.0) / 1000

    def _attempt(self, work: Callable[[], T], request_ids: Sequence[str]) -> T | Fault:
        outcome = attempt(work, request_ids, passes=(KeyboardInterrupt, SystemExit))
        if isinstance(outcome, Fault) and self._ends_process:
            end_all_ranks(self._name, outcome)
        return outcome

    def _to_blame(self, fault: Fault, batch: DraftBatch) -> list[str]:
        """Returns the requests to charge: the request that the proposer names, otherwise all requests with options for
        a custom proposer. If the proposer also fails without them, its next faults count. Proposers in the engine's
        thread read no options."""
        if self._thread is None:
            return []
        options = zip(batch.request_ids, batch.options, strict=True)
        suspects = [request_id for request_id, given in options if given and not SETTINGS.issuperset(given)]
        blamed = [fault.request_id] if fault.request_id in self._known - self._set_aside else suspects
        return [request_id for request_id in blamed if request_id not in self._set_aside]

    def _record(self, fault: Fault, charged_to: Sequence[str]) -> None:
        self._set_aside.update(charged_to)
        self._breaker.record(fault, charged_to)


def end_all_ranks(name: str, fault: Fault) -> None:
    """Ends this process, and thereby all ranks, after a fault of a proposer that every rank runs."""
    cause = name, DID[fault.kind], fault.cause
    with suppress(BaseException):  # a log filter of the proposer may raise
        logger.error("%s %s (%s) on one of several ranks. The engine stops: all ranks must draft alike.", *cause)
    os._exit(1)  # an orderly exit would wait for the other ranks


def attempt(
    work: Callable[[], T], request_ids: Sequence[str], passes: tuple[type[BaseException], ...] = ()
) -> T | Fault:
    """Returns the result of `work`, or its fault; exceptions in `passes` are raised."""
    try:
        return work()
    except passes:
        raise
    except BaseException as error:
        return fault_of(error, request_ids)
