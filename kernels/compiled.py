"""Compiles loops for the CPU with Numba, and passes many arrays and texts to them."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numba import carray, njit, types
from numba.core import caching, cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

Function = TypeVar("Function", bound=Callable[..., Any])

# Without it numba counts references, atomically, at each call.
inlined: Callable[[Function], Function] = njit(inline="always")


class _Shipped(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):  # type: ignore[misc]
    """Finds machine code next to the module if no folder can be written, as in an image with a read-only root."""

    def __init__(self, function: Any, file: str):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(Path(self._py_file).parent / "__pycache__")

    def ensure_cache_path(self) -> None:
        """Does nothing, since the folder is read-only."""


def _parts(function: Any, known: set[Any]) -> Iterator[Any]:
    """Yields the constants and the code that a function's machine code contains from elsewhere."""
    known.add(function)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, int | float | str | tuple):
            yield name, value
        elif (inner := getattr(value, "py_func", None)) is not None and inner not in known:
            constants = *inner.__code__.co_consts, *(inner.__defaults__ or ())
            yield inner.__code__.co_code, [x for x in constants if isinstance(x, int | float | str)]
            yield from _parts(inner, known)


@contextmanager
def _stamped(function: Any) -> Iterator[None]:
    """Makes a change of these parts invalidate the cache: Numba's stamp knows only the function's own file."""
    mixin, parts = caching._SourceFileBackedLocatorMixin, zlib.crc32(repr(list(_parts(function, set()))).encode())
    original = mixin.get_source_stamp
    mixin.get_source_stamp = lambda locator: (*original(locator), parts)
    try:
        yield
    finally:
        mixin.get_source_stamp = original


def compiled(signature: Any, nogil: bool = False) -> Callable[[Function], Function]:
    """Compiles at import, so no request waits, and caches the machine code next to the module if possible. `nogil` lets
    other threads run meanwhile; callers must then ensure that no thread changes the arrays."""

    build = partial(njit, signature, error_model="numpy", nogil=nogil)

    def decorate(function: Function) -> Function:
        with _stamped(function):
            try:
                return build(cache=True)(function)
            except RuntimeError:  # neither the package's folder nor the user's cache can be written
                pass
            caching.CompileResultCacheImpl._locator_classes = [_Shipped]
            try:
                return build(cache=True)(function)
            except OSError:  # the image has no code for this processor, and none can be saved
                return build()(function)
            finally:
                del caching.CompileResultCacheImpl._locator_classes

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), make


@inlined
def text_at(address: int, num_tokens: int) -> Any:
    return carray(_pointer(address), (num_tokens,), np.int32)


@intrinsic  # type: ignore[untyped-decorator]
def borrowed(typing_context: Any, array: Any) -> Any:
    """Returns the same array without reference counting. Use it only for arguments that the caller holds. Each use of a
    tuple of arrays changes the atomic counts; without them, linking a token takes 80 ns instead of 370."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = make_array(array)(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    return array(array), generate
