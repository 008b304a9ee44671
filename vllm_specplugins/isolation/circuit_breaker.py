"""Switches a proposer off after repeated faults, and on again after a pause."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_specplugins.counters import Counters, StageCounters

logger = logging.getLogger("vllm.specplugins")

MAX_FAULTS = 3  # so many faults
FAULT_WINDOW = 1000  # within so many steps switch a proposer off
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0  # for so long, twice as long each time
FORGIVEN_AFTER_S = 3600.0  # unless it was on for so long

FaultCounters = Counters | StageCounters  # where a guard counts


@dataclass(slots=True)
class CircuitBreaker:
    """Off for a pause after MAX_FAULTS within FAULT_WINDOW steps."""

    name: str
    health: FaultCounters
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    _fault_steps: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_FAULTS))
    _on_since: float = 0.0
    _off_until: float = 0.0

    def is_off(self) -> bool:
        """Tries the proposer again when its pause is over."""
        if self.health.switched_off and self.clock() >= self._off_until:
            self.health.switched_off = False
            self._on_since = self.clock()
            logger.warning("%s is tried again after a pause of %.0f s.", self.name, self.health.pause_s)
        return self.health.switched_off

    def add_fault(self) -> None:
        """Counts one in this step."""
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
        logger.warning(
            "%s failed %d times within %d steps and is switched off for %.0f s; requests go on without its drafts.",
            self.name,
            MAX_FAULTS,
            FAULT_WINDOW,
            health.pause_s,
        )
