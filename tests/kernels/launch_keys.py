"""What Triton compiles a kernel for anew: the keys of launches, computed as its JIT does, on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Key = tuple[str, str]


def launch_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """The kernel's name, and what it is compiled for: types, alignment, numbers that are 1, constants, options."""
    specialization, options = _binder(kernel)(*args, **kwargs)[1:]
    return kernel.fn.__name__, f"{specialization} {sorted(options.items())}"


@cache
def _binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    # A kernel in the interpreter keeps the arguments of its decorator.
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(function.signature, function.params, BaseBackend)


@contextmanager
def recorded(of: str, runs: bool = True) -> Iterator[set[Key]]:
    """Keys of the launches of kernels in modules with this prefix. Others run, and these too with `runs`. Nothing runs
    but in the interpreter.
    """
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kind = InterpretedFunction if knobs.runtime.interpret else JITFunction
    run, keys = kind.run, set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith(of):
            keys.add(launch_key(self, args, kwargs))
            if not runs:
                return None
        return run(self, *args, grid=grid, warmup=warmup, **kwargs) if kind is InterpretedFunction else None

    kind.run = record
    try:
        yield keys
    finally:
        kind.run = run
