"""The fault barrier: a proposer that raises, hangs or returns nonsense costs a draft, never a request.

Wraps any proposer. What passes the barrier is always a valid draft, if need be an empty one. A proposer that
runs on the host is called in a thread of its own, so that a hang can be left behind.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_specplugins.draft import Counters, Draft, DraftBatch, Feedback, Proposer
from vllm_specplugins.proposers.acceptance import Acceptance

logger = logging.getLogger("vllm.specplugins")

MAX_FAULTS = 3  # so many faults
FAULT_WINDOW = 1000  # within so many steps switch a proposer off
LOG_EVERY_S = 10.0  # as vLLM logs its own statistics, while there is something to say


class Fault(Exception):
    """One thing that a proposer did wrong: its kind for the counters, its cause for the log."""

    def __init__(self, kind: str, cause: str):
        super().__init__(cause)
        self.kind = kind


class FaultBarrier:
    """Calls a proposer so that nothing it does can reach a request.

    Args:
        proposer: the proposer to guard; an adapter that records a CUDA graph calls it directly.
        vocab_size: draft token ids must be in [0, vocab_size).
        max_num_draft: K.
        time_budget_ms: longest time for one step; None calls the proposer in the caller's thread, unbounded
            (for proposers that run the target's layers).
    """

    def __init__(self, proposer: Proposer, vocab_size: int, max_num_draft: int, time_budget_ms: float | None):
        self.counters = Counters()
        self.acceptance = Acceptance()
        self.proposer = proposer
        self._vocab_size = vocab_size
        self._max_num_draft = max_num_draft
        self._thread = None if time_budget_ms is None else _CallThread(time_budget_ms / 1000)
        self._to_forget: list[str] = []
        self._fault_steps: deque[int] = deque(maxlen=MAX_FAULTS)
        self._step = 0
        self._logged_at = time.monotonic()

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        """What became of the last drafts, in; the drafts of this step, out: valid ones, whatever happens.

        Requests that were to be forgotten are forgotten first, in the proposer's own thread.
        """
        self.count(feedback)
        if self.counters.switched_off or batch.num_reqs == 0:
            return Draft.empty(batch.num_reqs)
        self._step += 1
        forget, self._to_forget = self._to_forget, []
        start = time.perf_counter()
        try:
            draft = self._call(lambda: self._run(batch, feedback, forget))
            check_draft(draft, batch, self._vocab_size, self._max_num_draft)
            self.counters.add_drafts(int(np.count_nonzero(batch.max_num_draft)), draft.num_draft)
            return draft
        except Fault as fault:
            self._to_forget = forget + self._to_forget
            self._record(fault)
        except Exception as error:
            self._record(Fault("raised", f"{type(error).__name__}: {error}"))
            logger.debug("the proposer's traceback", exc_info=True)
        finally:
            self.counters.propose_ms += (time.perf_counter() - start) * 1000
        return Draft.empty(batch.num_reqs)

    def count(self, feedback: Feedback) -> None:
        """Counts one step's verification, and now and then logs the totals."""
        self.counters.add(feedback)
        self.acceptance.add(feedback)
        now = time.monotonic()
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            logger.info("Speculation so far: %s", self.totals().summary())

    def totals(self) -> Counters:
        """The counters, those of a cascade's stages included."""
        self.counters.stages = getattr(self.proposer, "stage_counters", dict)()
        return self.counters

    def forget(self, request_ids: Sequence[str]) -> None:
        """Has the proposer forget these requests before it next proposes."""
        if not self.counters.switched_off:
            self._to_forget.extend(request_ids)

    def _run(self, batch: DraftBatch, feedback: Feedback, forget: Sequence[str]) -> Draft:
        if forget:
            self.proposer.forget(forget)
        if feedback.request_ids:
            self.proposer.observe(feedback)
        return self.proposer.propose(batch)

    def _call(self, function: Callable[[], Draft]) -> Draft:
        return function() if self._thread is None else self._thread.call(function)

    def _record(self, fault: Fault) -> None:
        """Counts a fault, logs the first of its kind, and switches the proposer off after repeated ones."""
        faults = self.counters.faults
        faults[fault.kind] = faults.get(fault.kind, 0) + 1
        if faults[fault.kind] == 1:
            logger.warning(
                "The proposer %s (%s); its drafts of this step are dropped, requests go on.",
                fault.kind,
                fault,
            )
        self._fault_steps.append(self._step)
        if len(self._fault_steps) == MAX_FAULTS and self._step - self._fault_steps[0] < FAULT_WINDOW:
            self.counters.switched_off = True
            self._to_forget.clear()
            logger.warning(
                "The proposer failed %d times within %d steps and is switched off; requests go on without drafts.",
                MAX_FAULTS,
                FAULT_WINDOW,
            )


def check_draft(draft: Draft, batch: DraftBatch, vocab_size: int, max_num_draft: int) -> None:
    """Raises Fault unless `draft` has the right shapes and lengths and only token ids of the vocabulary."""
    if not isinstance(draft, Draft):
        raise Fault("returned nonsense", f"a {type(draft).__name__} instead of a Draft")
    token_ids, num_draft = draft.token_ids, draft.num_draft
    on_device = batch.target is not None and not isinstance(token_ids, np.ndarray)
    for name, array, ndim in (("token_ids", token_ids, 2), ("num_draft", num_draft, 1)):
        is_array = isinstance(array, np.ndarray) or (on_device and array is token_ids and hasattr(array, "ndim"))
        if not is_array or array.ndim != ndim or array.shape[0] != batch.num_reqs:
            raise Fault("returned nonsense", f"{name} is not an array with {batch.num_reqs} rows and {ndim} dims")
        if str(array.dtype).removeprefix("torch.") != "int32":
            raise Fault("returned nonsense", f"{name} is {array.dtype} instead of int32")
    width = token_ids.shape[1]
    if width > max_num_draft:
        raise Fault("returned nonsense", f"{width} draft tokens where {max_num_draft} are allowed")
    if (num_draft < 0).any() or (num_draft > np.minimum(batch.max_num_draft, width)).any():
        raise Fault("returned nonsense", "num_draft is outside of 0..max_num_draft")
    if on_device:  # the ids are an argmax over the vocabulary; reading them would wait for the device
        return
    used = token_ids[np.arange(width) < num_draft[:, None]]
    if ((used < 0) | (used >= vocab_size)).any():
        raise Fault("returned nonsense", f"a token id outside of 0..{vocab_size - 1}")


class _CallThread:
    """Runs one function at a time in a daemon thread and waits for it at most `budget_s` seconds.

    A call that takes longer is left behind; until it returns, every further call is refused.
    """

    def __init__(self, budget_s: float):
        self._budget_s = budget_s
        self._function: Callable[[], Draft] | None = None
        self._outcome: tuple[Draft | None, Exception | None] = (None, None)
        self._wanted, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left_behind = False
        threading.Thread(target=self._loop, name="specplugins-proposer", daemon=True).start()

    def call(self, function: Callable[[], Draft]) -> Draft:
        """The function's result; its exception if it raises, Fault if it does not return in time."""
        if self._left_behind:
            if not self._done.acquire(blocking=False):
                raise Fault("hangs", "an earlier call has not returned yet")
            self._left_behind = False
        self._function = function
        self._wanted.release()
        if not self._done.acquire(timeout=self._budget_s):
            self._left_behind = True
            raise Fault("hangs", f"no answer within its budget of {self._budget_s * 1000:.0f} ms")
        result, error = self._outcome
        self._outcome = (None, None)
        if error is not None:
            raise error
        assert result is not None or error is None
        return result  # type: ignore[return-value]

    def _loop(self) -> Any:
        while True:
            self._wanted.acquire()
            assert self._function is not None
            try:
                self._outcome = (self._function(), None)
            except Exception as error:
                self._outcome = (None, error)
            self._function = None
            self._done.release()
