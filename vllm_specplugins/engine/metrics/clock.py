"""Times some calls on the device that they run on, and waits for none of them."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

LONGEST_LIST = 1000  # times that nobody takes are dropped, the oldest first
EVERY = 64  # call is timed on a GPU: two events take the host some ten microseconds


class DeviceClock:
    """Collects the durations of calls, on a GPU of every 64th, in seconds.

    On a GPU a call returns before its kernels have run: a pair of events around it says how long they took, and is
    read when they are done.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds: deque[float] = deque(maxlen=LONGEST_LIST)
        self._events: deque[tuple[Any, Any]] = deque(maxlen=LONGEST_LIST)
        self._num_calls = 0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        self._num_calls += 1
        if self._on_gpu and self._num_calls % EVERY != 1:
            return function(*args, **kwargs)
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = function(*args, **kwargs)
            end.record()
            self._events.append((begin, end))
            return result
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self._seconds.append(time.perf_counter() - start)
        return result

    def take(self) -> list[float]:
        """The durations since the last time, of the calls that are over."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds.append(begin.elapsed_time(end) / 1000)
        taken = list(self._seconds)
        self._seconds.clear()
        return taken
