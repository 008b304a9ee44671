"""Streams, events and copies to the host.

Kernels run when they are issued. What is late are copies from the device to the host: until the host has waited for
an event or a stream behind a copy, its target holds nonsense. A copy on a side stream reads its source as late as the
order of streams allows, so that a source that is overwritten too early is seen, too.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from simulated_device import tape
from simulated_device.operations import poison

_lock = threading.RLock()  # outputs are waited for in a thread of vLLM's


@contextmanager
def _unseen() -> Iterator[None]:
    """Runs work of the simulation itself, without tape and ledger."""
    with _lock, torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class _Copy:
    """Device to host: read when its stream gets to it, seen when the host has waited."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source
        self._value: torch.Tensor | None = None
        self.arrived = False
        with _unseen():
            poison(target)

    def read(self) -> None:
        with _unseen():
            if self._value is None and not self.arrived:
                self._value = self._source.clone()

    def arrive(self) -> None:
        with _unseen():
            if not self.arrived:
                self.read()
                self._target.copy_(self._value)
                self.arrived, self._value = True, None


class Stream:
    """torch.cuda.Stream: which copies the work on it comes after."""

    waited: Callable[[], None] = staticmethod(lambda: None)  # told when the host waits for a stream

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = torch.device("cpu")
        self.copies: list[_Copy] = []

    def add(self, copy: _Copy) -> None:
        if self is streams.default:
            copy.read()  # what runs on this stream later may overwrite the source
        self.copies = [*(other for other in self.copies if not other.arrived), copy]

    def wait_stream(self, other: "Stream") -> None:
        self._come_after(other.copies)

    def wait_event(self, event: "Event") -> None:
        self._come_after(event.copies)

    def _come_after(self, copies: list[_Copy]) -> None:
        for copy in copies:
            copy.read()
        self.copies = [copy for copy in {*self.copies, *copies} if not copy.arrived]

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return all(copy.arrived for copy in self.copies)

    def synchronize(self) -> None:
        Stream.waited()
        self.arrive()

    def arrive(self) -> None:
        for copy in self.copies:
            copy.arrive()
        self.copies = []

    def __enter__(self) -> "Stream":  # vLLM's placeholder was a context, too
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    """torch.cuda.Event: a point in a stream."""

    waited: Callable[["Event"], None] = staticmethod(lambda event: None)  # told when the host waits for an event

    def __init__(self, *args: Any, **options: Any) -> None:
        self.copies: list[_Copy] = []
        self.recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.copies = list((stream or streams.current()).copies)
        self.recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or streams.current()).wait_event(self)

    def query(self) -> bool:
        """Whoever asks twice has waited."""
        done = all(copy.arrived for copy in self.copies)
        self._arrive()
        return done

    def synchronize(self) -> None:
        Event.waited(self)
        self._arrive()

    def _arrive(self) -> None:
        for copy in self.copies:
            copy.arrive()

    def elapsed_time(self, end: "Event") -> float:
        return (end.recorded_at - self.recorded_at) * 1000


class _Streams:
    """The current stream of each thread."""

    def __init__(self) -> None:
        self.default = Stream()
        self.used: list[Stream] = []
        self._local = threading.local()

    def current(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.default)
        return stream

    def set(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        before = self.current()
        self.set(stream or before)
        try:
            yield
        finally:
            self.set(before)


streams = _Streams()


def copy_to_host(source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """A copy that does not block, on the current stream."""
    if tape.capturing():
        tape.refuse("a copy to the host")
    if target is None:
        with _unseen():
            target = torch.empty(source.shape, dtype=source.dtype)
    stream = streams.current()
    with _lock:
        if stream not in streams.used:
            streams.used.append(stream)
        stream.add(_Copy(target, source))
    return target


def synchronize(device: Any = None) -> None:
    if tape.capturing():
        tape.refuse("a wait for the device")
    Stream.waited()
    for stream in list(streams.used):
        stream.arrive()


TORCH_CUDA: dict[str, Any] = {
    "CUDAGraph": tape.TapeGraph,
    "graph": tape.Capture,
    "graph_pool_handle": lambda: (0, 0),
    "is_current_stream_capturing": tape.capturing,
    "Stream": Stream,
    "Event": Event,
    "current_stream": streams.current,
    "default_stream": lambda device=None: streams.default,
    "set_stream": streams.set,
    "stream": streams.using,
    "synchronize": synchronize,
    "empty_cache": lambda: None,
}
