"""Limits the share of time that learning takes, with a rest after each piece of work."""

import time
from collections.abc import Callable
from threading import Event

IDLE_AFTER_S = 0.25  # time without a step after which the engine counts as idle
MAX_REST_S = 0.05  # interval of the checks whether the engine is idle


class Stopped(Exception):
    """Raised to end learning."""


class Pace:
    """Rests so that work takes `busy_share` of the time while the engine runs steps, and `idle_share` while it runs
    none. `wait` waits for some seconds and returns whether to stop; `meanwhile` is called before each wait."""

    def __init__(
        self,
        busy_share: float,
        idle_share: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self._shares, self._clock = (idle_share, busy_share), clock
        self._stop = Event()
        self._wait_for, self._meanwhile = wait or self._stop.wait, meanwhile
        self.stepped_at = -1e9  # written by the engine's thread
        self._since = clock()
        self.worked_s = 0.0

    def stop(self) -> None:
        self._stop.set()

    def begin(self) -> None:
        self._since = self._clock()

    def rest(self) -> None:
        """Rests for the work since the last rest. Raises Stopped if learning ends."""
        worked = self._clock() - self._since
        self.worked_s += worked
        while worked > 0:
            share = self._shares[self._clock() - self.stepped_at < IDLE_AFTER_S]
            owed = worked * (1 - share) / share
            rest = min(owed, MAX_REST_S)
            self._wait(rest)
            worked = worked - rest * share / (1 - share) if rest < owed else 0.0
        self.begin()

    def pause(self) -> None:
        self._wait(MAX_REST_S)
        self.begin()

    def _wait(self, seconds: float) -> None:
        self._meanwhile()
        if self._wait_for(seconds):
            raise Stopped
