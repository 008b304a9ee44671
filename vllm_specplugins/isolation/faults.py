"""Counts and logs a proposer's faults. A circuit breaker switches the proposer off."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_specplugins.config import one_line
from vllm_specplugins.counters import Counters, StageCounters
from vllm_specplugins.draft import RequestFault
from vllm_specplugins.isolation.exchange import Nonsense, NotFinite

logger = logging.getLogger("vllm.specplugins")

TRACEBACK = "The traceback:\n%s"  # the format of its record
_PACKAGE = str(Path(__file__).parents[1])
LONGEST_CAUSE = 300  # characters of an exception in the log

RAISED, HANGS, NONSENSE, SLOW = "raised", "hangs", "returned nonsense", "is slow"
CHARGED = "charged to a request"
NOT_FINITE = "drew from logits that are not finite"  # counted in tokens; the other causes are counted in steps
CAUSES = (RAISED, HANGS, NONSENSE, SLOW, CHARGED, NOT_FINITE)
DID = {  # words for the log and for `check`; the causes are labels of a metric
    RAISED: "raised an exception",
    HANGS: "did not answer in time",
    NONSENSE: "returned an invalid draft",
    SLOW: "was too slow",
    CHARGED: "raised an exception for the options of a request",
    NOT_FINITE: NOT_FINITE,
}

# MAX_FAULTS faults within FAULT_WINDOW steps switch a proposer off. The pause doubles each time, unless the proposer
# has run for FORGIVEN_AFTER_S since the last one.
MAX_FAULTS, FAULT_WINDOW = 3, 1000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
FORGIVEN_AFTER_S = 3600.0

FaultCounters = Counters | StageCounters


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the request that caused it, if the proposer names one."""

    kind: str
    cause: str
    request_id: str | None = None
    count: int = 1


@dataclass(slots=True)
class CircuitBreaker:
    """Switches a proposer off after repeated faults, and tries again after a pause."""

    name: str
    health: FaultCounters
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    _fault_steps: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_FAULTS))
    _on_since: float = 0.0
    _off_until: float = 0.0

    def is_off(self) -> bool:
        """Returns whether the proposer is switched off, and closes the circuit breaker when its pause is over."""
        if self.health.switched_off and self.clock() >= self._off_until:
            self.health.switched_off = False
            self._on_since = self.clock()
            _warn("%s: the circuit breaker closes after %.0f s, and drafting resumes.", self.name, self.health.pause_s)
        return self.health.switched_off

    def record(self, fault: Fault, charged_to: Sequence[str]) -> None:
        """Counts a fault, logs the first of its kind, and may switch the proposer off unless requests caused it."""
        kind, faults = CHARGED if charged_to else fault.kind, self.health.faults
        is_first = kind not in faults
        faults[kind] = faults.get(kind, 0) + fault.count
        if not charged_to:
            self.add_fault()
        if is_first:
            who = f"{len(charged_to)} requests continue without its drafts" if charged_to else "Requests continue"
            words = "%s %s (%s). %s. Later faults of this kind are only counted."
            _warn(words, self.name, DID[fault.kind], fault.cause, who)

    def add_fault(self) -> None:
        self._fault_steps.append(self.step)
        if len(self._fault_steps) < MAX_FAULTS or self.step - self._fault_steps[0] >= FAULT_WINDOW:
            return
        self._fault_steps.clear()
        now, health = self.clock(), self.health
        is_relapse = health.times_switched_off > 0 and now - self._on_since < FORGIVEN_AFTER_S
        health.pause_s = min(2 * health.pause_s, LONGEST_PAUSE_S) if is_relapse else FIRST_PAUSE_S
        health.switched_off = True
        health.times_switched_off += 1
        self._off_until = now + health.pause_s
        _warn(
            "%s failed %d times in %d steps: the circuit breaker opens for %.0f s. Requests continue without drafts.",
            self.name,
            MAX_FAULTS,
            FAULT_WINDOW,
            health.pause_s,
        )


def _warn(*sentence: object) -> None:
    """Logs a warning, unless a filter or a handler that a proposer has installed raises."""
    with suppress(BaseException):
        logger.warning(*sentence)


def fault_of(error: BaseException, request_ids: Sequence[str]) -> Fault:
    if isinstance(error, NotFinite):
        return Fault(NOT_FINITE, cause_text(error).removeprefix("NotFinite: "), count=error.num_tokens)
    if isinstance(error, Nonsense):
        return Fault(NONSENSE, cause_text(error).removeprefix("Nonsense: "))
    return Fault(RAISED, cause_text(error) + _place(error), _blamed(error, request_ids))


def _place(error: BaseException) -> str:
    """Returns the line of the proposer's file that raised, or that called the code that raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f", at {Path(frames[0].filename).name}:{lines[-1]}" if frames else ""


def _blamed(error: BaseException, request_ids: Sequence[str]) -> str | None:
    """Returns the request that a RequestFault names. The proposer may have set the attribute to any value."""
    request_id = vars(error).get("request_id") if isinstance(error, RequestFault) else None
    return request_id if type(request_id) is str and request_id in request_ids else None


def cause_text(error: BaseException) -> str:
    """Returns an exception as one line for the log. Its `__str__` is code of the proposer and may raise."""
    try:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(TRACEBACK, "".join(traceback.format_exception(error)))
        first_line = f"{error}".strip().partition("\n")[0]
        return one_line(f"{type(error).__name__}: {first_line}", LONGEST_CAUSE)
    except BaseException:
        return "an exception that cannot be shown"
