"""A CUDA graph's stand-in: a tape of operations that run again, on the same tensors, without what issued them.

While a capture is open, every operation that reaches PyTorch's dispatcher and every launch of an interpreted Triton
kernel is put on the tape, with the tensors it read and the tensors it made. `replay` runs them in order. What an
out-of-place operation returns is copied into the tensor that it returned when it was recorded, so that addresses are
static. Capturing leaves no trace: as on a GPU, nothing has been computed when it ends.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from simulated_device import operations
from simulated_device.operations import address, poison, tensors

Tensor = torch.Tensor
GRAPH_BYTES = 3 << 20  # that each graph takes of the device's memory
alive: "WeakSet[TapeGraph]" = WeakSet()  # all graphs that have been captured
_open = threading.local()  # .graph: the graph whose capture is open in this thread


class CaptureError(RuntimeError):
    """Something that a CUDA graph cannot hold."""


def memory_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, of which only graphs take any."""
    total = 1 << 40
    return total - GRAPH_BYTES * len(alive), total


def recording() -> "TapeGraph | None":
    """The graph whose capture is open in this thread."""
    return getattr(_open, "graph", None)


def capturing() -> bool:
    return recording() is not None


def refuse(words: str) -> NoReturn:
    """Ends the open capture, as a wait does: nothing can be launched in it from now on."""
    _open.graph.is_invalid = True
    raise CaptureError(words)


def check_capture() -> None:
    if capturing() and _open.graph.is_invalid:
        raise CaptureError("the capture is invalid since a wait in it")


class TapeGraph:
    """torch.cuda.CUDAGraph's interface, as far as vLLM uses it."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: list[Callable[[], Any]] = []
        self.contents: Counter[str] = Counter()  # how often each operation is on the tape
        self.num_replays = 0
        self.ready = self.is_invalid = False
        self._made: dict[int, Tensor] = {}  # storages that belong to the graph, by address
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other storages it writes to, and what stood there
        self._modes = ExitStack()

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        if capturing():
            raise CaptureError("two captures at once")
        if self.ready:
            raise CaptureError("a graph is captured once")
        _open.graph = self
        self._modes.enter_context(_NoHost())
        self._modes.enter_context(_Recorder(self))

    def capture_end(self) -> None:
        self._modes.close()
        _open.graph = None
        with torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
            for now, before in self._before.values():
                now.copy_(before)
            for made in self._made.values():
                poison(made)
        self._before.clear()
        if self.is_invalid:
            raise CaptureError("the capture is invalid since a wait in it")
        self.ready = True
        alive.add(self)

    def replay(self) -> None:
        if capturing():
            raise CaptureError("a replay inside of a capture")
        if not self.ready:
            raise CaptureError("a replay before a capture")
        self.num_replays += 1
        with torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
            for step in self.tape:
                step()

    def reset(self) -> None:
        self.__init__()

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def add_operation(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        fresh = operations.fresh(args, kwargs, results)
        targets = [tensor if is_fresh else None for tensor, is_fresh in zip(tensors(results), fresh, strict=True)]
        for target in targets:
            if target is not None:
                self._made[address(target)] = _whole(target)
        if fresh and not any(fresh) and not func._schema.is_mutable:
            return  # a view: the same storage
        if func in operations.ALLOCATIONS:
            self.tape += [partial(poison, tensor) for tensor in tensors(results)]
            return
        self.contents[str(func)] += 1
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # lists may be changed later
        run = partial(func, *args, **kwargs)
        self.tape.append(partial(_run_into, targets, run) if any(fresh) else run)

    def add_launch(self, name: str, launch: Callable[[], Any]) -> None:
        self.contents[name] += 1
        self.tape.append(launch)

    def will_write(self, written: list[Tensor]) -> None:
        """Keeps what stands in storages that are not the graph's own, to put it back when the capture ends."""
        for tensor in written:
            key = address(tensor)
            if key and key not in self._made and key not in self._before:
                whole = _whole(tensor)
                self._before[key] = (whole, whole.clone())


class Capture:
    """torch.cuda.graph."""

    def __init__(self, cuda_graph: TapeGraph, pool: Any = None, stream: Any = None, **options: Any) -> None:
        self._graph, self._stream = cuda_graph, stream
        self._stack = ExitStack()

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._stack.enter_context(torch.cuda.stream(self._stream))
        self._graph.capture_begin()

    def __exit__(self, error: Any, *rest: Any) -> None:
        with self._stack:
            self._graph.capture_end()
        if error is not None:
            self._graph.reset()


def launch(name: str, kernel: Callable[[], Any], writes: list[Tensor]) -> None:
    """Runs a kernel, which may read tensors on the host as no operation may, and records it as one step."""
    check_capture()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if capturing():
            _open.graph.will_write(writes)
        kernel()
        if capturing():
            _open.graph.add_launch(name, kernel)


class _Recorder(operations.Kernels):
    def __init__(self, graph: TapeGraph) -> None:
        super().__init__()
        self._graph = graph

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        check_capture()
        if operations.waits(func, args, kwargs) or func is torch.ops.aten.lift_fresh.default:
            refuse(f"{func} waits for the device")
        self._graph.will_write(operations.written(func, args, kwargs))
        results = func(*args, **kwargs)
        self._graph.add_operation(func, args, kwargs, results)
        return results


class _NoHost(TorchFunctionMode):
    """Refuses the ways to the host that the dispatcher never sees, because here they are no copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in operations.HOST_READS or func is Tensor.cpu:
            refuse(f"{func.__name__} reads from the device")
        if func is Tensor.to and "cpu" in (value for value in args[1:] if isinstance(value, str)):
            refuse('to("cpu") reads from the device')
        return func(*args, **(kwargs or {}))


def _run_into(targets: list[Tensor | None], run: Callable[[], Any]) -> None:
    for target, result in zip(targets, tensors(run()), strict=True):
        if target is not None:
            target.copy_(result)


def _whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor's storage, flat, in the tensor's dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (size,))
