"""What Triton compiles a kernel for anew: the keys of launches, computed as its JIT does, on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Key = tuple[str, str]


def launch_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """The kernel's name, and what it is compiled for: types, alignment, numbers that are 1, constants, options."""
    specialization, options = _binder(kernel)(*args, **kwargs)[1:]
    return kernel.fn.__name__, f"{specialization} {sorted(options.items())}"


def variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """The kernel's name, and what decides which parts of its code are compiled: arguments that are None, lengths of
    tuples, and flags. Sizes and types do not count.
    """
    return kernel.fn.__name__, f"{form_of(args)} {sorted((name, form_of(value)) for name, value in kwargs.items())}"


def form_of(value: Any) -> Any:
    """Tuples, None and flags as they are, everything else alike."""
    if isinstance(value, tuple):
        return tuple(map(form_of, value))
    return value if value is None or isinstance(value, bool) else ...


def launch_checks(shapes: Any) -> None:
    """Launches what the self-check of a configuration with these shapes launches."""
    from vllm_specplugins.kernels.self_check import _checks

    for _, make_case in _checks(shapes):
        case = make_case()
        case.operation(*case.arguments, implementation="fused")


def checked(shapes: Any) -> set[Key]:
    """The variants that the self-check launches."""
    heads = shapes.heads and (2, 1, 16)
    sizes = {"vocab_size": 300, "max_num_draft": 2, "heads": heads, "num_slots": 16, "dtype": torch.float32}
    return _checked(shapes._replace(**sizes))


@cache
def _checked(shapes: Any) -> set[Key]:
    with recorded("vllm_specplugins.kernels", runs=False, key_of=variant) as keys:
        launch_checks(shapes)
    return keys


@cache
def _binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    # A kernel in the interpreter keeps the arguments of its decorator.
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(function.signature, function.params, BaseBackend)


@contextmanager
def recorded(of: str, runs: bool = True, key_of: Callable[..., Key] = launch_key) -> Iterator[set[Key]]:
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
            keys.add(key_of(self, args, kwargs))
            if not runs:
                return None
        return run(self, *args, grid=grid, warmup=warmup, **kwargs) if kind is InterpretedFunction else None

    kind.run = record
    try:
        yield keys
    finally:
        kind.run = run
