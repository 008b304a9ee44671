"""Triton's interpreter without most of its time: what it looks up anew in every launch and call of a kernel.

It imports nothing of the simulated device's: the kernels' tests use it, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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

    def set_member(package: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        """A member without the check that a kernel calls it."""
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(package, name, called)

    # A sum of 32 bits is computed again in 64 for an assertion, which only a debugger's launch would make.
    builder = interpreter.interpreter_builder
    unchecked = replace(builder.options, sanitize_overflow=False)
    make_type, make_tensor = types_made_once(tl.core)
    unwrap = tl.core._unwrap_if_constexpr

    def unwrapped(value: Any) -> Any:
        return value if isinstance(value, tl.core.tensor) else unwrap(value)

    with patch.object(interpreter, "_patch_attr", set_member):
        language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    try:
        with (
            patch.object(interpreter, "_patch_lang", lambda kernel: nothing),
            patch.object(interpreter, "_get_np_dtype", dtype_of),
            patch.object(interpreter.InterpretedFunction, "__call__", call),
            patch.object(builder, "options", unchecked),
            patch.object(tl.core, "_unwrap_if_constexpr", unwrapped),
            patch.object(tl.core.block_type, "__init__", make_type),
            patch.object(tl.core.tensor, "__init__", make_tensor),
        ):
            yield
    finally:
        language.restore()


def types_made_once(core: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """In place of `block_type.__init__` and `tensor.__init__`: a type's name and a tensor's shape of constants, which
    take longer than its operation, are made once for each shape."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    def type_of(self: Any, element_ty: Any, shape: Any) -> None:
        if (key := (element_ty.name, *shape)) not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        else:
            vars(self).update(types[key], element_ty=element_ty)

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        if (name := type.name) not in shapes:
            make_tensor(self, handle, type)
            shapes[name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[name]

    return type_of, tensor_of
