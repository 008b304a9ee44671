"""For which kinds of arguments Triton compiles a kernel anew, as its JITFunction decides it."""

import inspect
from functools import cache
from typing import Any

import torch


def specialisation_of(kernel: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The key of a launch of an interpreted kernel: its compiled form would be found by it."""
    constants, plain, aligned_only = _parameters(kernel)
    given = inspect.getcallargs(kernel.fn, *args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    options = tuple(sorted((k, v) for k, v in kwargs.items() if k not in kernel.arg_names))
    kinds = [
        ("constexpr", _hashable(value))
        if name in constants
        else _kind(value, specialise=name not in plain, aligned=name not in aligned_only)
        for name, value in given.items()
    ]
    return kernel.__name__, tuple(kinds), options


@cache
def _parameters(kernel: Any) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of constexpr parameters, of those not to specialise, of those whose alignment does not matter."""
    parameters = inspect.signature(kernel.fn).parameters
    constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}

    def named(option: str) -> set[str]:
        given = kernel.kwargs.get(option) or ()
        return {list(parameters)[item] if isinstance(item, int) else item for item in given}

    return (
        frozenset(constants),
        frozenset(named("do_not_specialize")),
        frozenset(named("do_not_specialize_on_alignment")),
    )


def _kind(value: Any, specialise: bool, aligned: bool) -> Any:
    if isinstance(value, torch.Tensor):
        by_16 = specialise and aligned and value.data_ptr() % 16 == 0
        return str(value.dtype), by_16
    if isinstance(value, tuple):
        return tuple(_kind(item, specialise, aligned) for item in value)
    if isinstance(value, bool) or value is None:
        return ("constexpr", value) if value is None else "i1"
    if isinstance(value, int):
        if specialise and value == 1:
            return ("constexpr", 1)
        width = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return width, specialise and aligned and value % 16 == 0
    return "fp32" if isinstance(value, float) else _hashable(value)


def _hashable(value: Any) -> Any:
    return getattr(value, "value", value) if not callable(value) else getattr(value, "__name__", repr(value))
