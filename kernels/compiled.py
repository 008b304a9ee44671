"""Compiled loops of operations that run on the host."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

inlined: Callable[[Function], Function] = njit(inline="always")


def compiled(signature: Any) -> Callable[[Function], Function]:
    """Compile at import, so that no request waits for it, and keep the machine code beside the module if possible."""

    def decorate(function: Function) -> Function:
        try:
            return njit(signature, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
        except RuntimeError:  # neither the package's folder nor the user's cache can be written
            return njit(signature, error_model="numpy")(function)  # type: ignore[no-any-return]

    return decorate
