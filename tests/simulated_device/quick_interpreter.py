"""Triton's interpreter without most of its time: what it looks up anew in every launch and call of a kernel.

It imports nothing of the simulated device's: the kernels' tests use it, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """The language of kernels is the interpreter's all the time, and not from a launch to its end."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes: dict[str, Any] = {}
    find_dtype = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> Any:
        """The interpreter lists all dtypes to look up one."""
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    try:
        with (
            patch.object(interpreter, "_patch_lang", lambda kernel: nothing),
            patch.object(interpreter, "_get_np_dtype", dtype_of),
            patch.object(interpreter.InterpretedFunction, "__call__", call),
        ):
            yield
    finally:
        language.restore()
