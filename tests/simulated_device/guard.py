"""PyTorch with a device: copies between it and the host are copies, and reading it from the host is a wait.

Two modes stand around all that vLLM's worker does. One sees Python's calls, where a device is named; the other sees
what reaches the dispatcher. In a step a wait is written into the ledger, and raises where waits are forbidden, but
inside of vLLM's `gpu_sync_allowed()`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from simulated_device import operations, tape
from simulated_device.ledger import Ledger
from simulated_device.memory import Memory
from simulated_device.operations import tensors
from simulated_device.streams import Event, copy_to_host

Tensor = torch.Tensor
_IS_CUDA = Tensor.is_cuda.__get__
_COPY = torch.ops.aten.copy_.default


class DeviceError(RuntimeError):
    """What a real device refuses, or a step that must not wait and does."""


class Guard:
    """The state that both modes share."""

    def __init__(self, ledger: Ledger, is_cuda: bool) -> None:
        self.memory, self.ledger = Memory(), ledger
        self.is_cuda = is_cuda  # what the device's tensors answer
        self.forbids_waits = False
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a call of the worker; once, however deep."""
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            with _Calls(self), _Operations(self):
                yield
        finally:
            self._depth -= 1

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if tape.capturing():
            return
        if not self.ledger.in_step:
            return
        place = f"{_place()} {what}"
        self.ledger.places[place] += 1
        if self.forbids_waits and not _waits_allowed():
            raise DeviceError(f"{place} waits for the device")

    def wait_for(self, event: Event) -> None:
        """The host waits for an event: one of an earlier step has passed, as far as a host that runs ahead can tell."""
        if event.recorded_at >= self.ledger.step_began:
            self.wait("an event of this step")


class _Calls(TorchFunctionMode):
    """What Python asks of PyTorch."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if func == _IS_CUDA:
            return guard.is_cuda and guard.memory.is_device(args[0])
        if func in operations.HOST_READS and guard.memory.is_device(args[0]):
            if func in (Tensor.numpy, Tensor.__array__):
                raise DeviceError(f"{_place()} {func.__name__} of a tensor on the device")
            guard.wait(func.__name__)
            with torch._C.DisableTorchFunction():
                return func(args[0], *args[1:], **kwargs)
        if func is Tensor.cpu and guard.memory.is_device(args[0]):
            return self._to_host(args[0], {}, False)
        if func is Tensor.to:
            return self._to(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device):
            for tensor in tensors(result):
                guard.memory.claim(tensor)
        return result

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensor.to: a device is named by a torch.device, the host by "cpu"."""
        guard, source = self._guard, args[0]
        places = [value for value in (*args[1:], kwargs.get("device")) if isinstance(value, (str, torch.device))]
        if not places or tape.capturing():
            return func(*args, **kwargs)
        rest = {"args": args, "kwargs": kwargs}
        non_blocking = bool(kwargs.get("non_blocking"))
        if isinstance(places[0], str) and guard.memory.is_device(source):
            return self._to_host(source, rest, non_blocking)
        if isinstance(places[0], torch.device) and guard.memory.is_host(source):
            if not non_blocking:
                guard.wait("to a device, which blocks")
            result = func(*args, **kwargs)
            result = result.clone() if operations.address(result) == operations.address(source) else result
            guard.memory.claim(result)
            return result
        return func(*args, **kwargs)

    def _to_host(self, source: Tensor, rest: Any, non_blocking: bool) -> Tensor:
        guard = self._guard
        if rest:
            dtype = [value for value in (*rest["args"][1:], rest["kwargs"].get("dtype")) if _is_dtype(value)]
            source = source.to(dtype[0]) if dtype and dtype[0] != source.dtype else source
        if non_blocking:
            return copy_to_host(source)
        guard.wait("to the host")
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return source.clone()


class _Operations(operations.Kernels):
    """What reaches the dispatcher."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        guard, memory = self._guard, self._guard.memory
        given = tensors((args, kwargs))
        if not any(memory.is_device(tensor) for tensor in given):
            return func(*args, **kwargs)
        if func is _COPY and not tape.capturing():
            return self._copy(func, args, kwargs)
        if operations.waits(func, args, kwargs):
            guard.wait(str(func))
        if func.namespace == "aten":
            self._check_places(func, args, given)
        else:  # this platform's wrappers of kernels make their outputs without naming a device
            for tensor in operations.written(func, args, kwargs):
                memory.claim(tensor)
        results = func(*args, **kwargs)
        fresh = operations.fresh(args, kwargs, results)
        for tensor, is_fresh in zip(tensors(results), fresh, strict=True):
            if is_fresh:
                memory.claim(tensor)
        return results

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        guard, memory = self._guard, self._guard.memory
        target, source, *rest = args
        non_blocking = bool(rest[0] if rest else kwargs.get("non_blocking"))
        if memory.is_host(target):
            if non_blocking and target.dtype == source.dtype and target.shape == source.shape:
                return copy_to_host(source, target)
            guard.wait("copy_ to the host")
        elif memory.is_host(source) and not non_blocking:
            guard.wait("copy_ to the device, which blocks")
        return func(*args, **kwargs)

    def _check_places(self, func: Any, args: Any, given: list[Tensor]) -> None:
        """PyTorch takes single numbers and indexes from the host, and nothing else."""
        allowed = {id(index) for index in operations.indexes(func, args)}
        for tensor in given:
            if tensor.ndim and self._guard.memory.is_host(tensor) and func is not _COPY:
                if id(tensor) in allowed:
                    self._guard.wait("an index from the host")
                elif not tape.capturing():
                    raise DeviceError(f"{_place()} {func} of tensors on the host and on the device")


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _waits_allowed() -> bool:
    from vllm.utils import gpu_sync_debug

    return bool(gpu_sync_debug._allow_depth.get())


def _place() -> str:
    """The line outside of PyTorch and of the simulation that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if "/simulated_device/" not in path and "/torch/" not in path and not path.endswith("contextlib.py"):
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"
