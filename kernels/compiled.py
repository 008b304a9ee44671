"""How loops are compiled for the CPU, by numba."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

# Without it numba counts references, atomically, at each call.
inlined: Callable[[Function], Function] = njit(inline="always")


def compiled(signature: Any) -> Callable[[Function], Function]:
    """Compile at import, so that no request waits for it, and keep the machine code beside the module if possible."""

    def decorate(function: Function) -> Function:
        try:
            return njit(signature, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
        except RuntimeError:  # neither the package's folder nor the user's cache can be written
            return njit(signature, error_model="numpy")(function)  # type: ignore[no-any-return]

    return decorate


def _as_pointer(typing: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), make


_pointer: Any = intrinsic(_as_pointer)


@inlined
def text_at(address: int, num_tokens: int) -> Any:
    """The int32 tokens that lie there."""
    return carray(_pointer(address), (num_tokens,), np.int32)
