"""What Triton's interpreter lacks for vLLM's kernels, and most of its time; its launches as the device's."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulated_device import tape
from simulated_device.operations import tensors
from simulated_device.patches import Patches


def patch_interpreter(patches: Patches) -> None:
    import triton.language as tl
    from triton.runtime import interpreter
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    names: dict[Any, list[str]] = {}
    masked_store = interpreter.InterpreterBuilder.create_masked_store

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """The interpreter looks for the builtins of its language in every call of a kernel."""
        is_builtin = interpreter.tl.core.is_builtin
        if package not in names:
            names[package] = [name for name in dir(package) if is_builtin(getattr(package, name))]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not so inside of another call, which has patched it already
                interpreter._patch_attr(package, name, member, builder, scope)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)  # that of a grammar's bits is of integers
        return masked_store(self, pointers, value, mask, *rest)

    dtypes: dict[str, Any] = {}
    find_dtype = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> Any:
        """The interpreter lists all dtypes to look up one."""
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    everywhere, patch_lang = SimpleNamespace(__globals__={"tl": tl, "core": tl.core}), interpreter._patch_lang

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)  # of a kernel, whose launch has patched the language

    patches.set(interpreter, "_patch_lang", lambda kernel: patch_lang(everywhere))
    patches.set(interpreter, "_get_np_dtype", dtype_of)
    patches.set(interpreter, "_patch_builtin", patch_builtin)
    patches.set(interpreter.InterpretedFunction, "__call__", call)
    patches.set(interpreter.InterpreterBuilder, "create_masked_store", create_masked_store)
    patch_profile_run(patches)
    # vLLM takes residuals of a dense q with libdevice's log1p.
    patches.set(rejection_sampler_utils, "tldevice", SimpleNamespace(log1p=lambda x: tl.log(1.0 + x)))


def patch_profile_run(patches: Patches) -> None:
    """Attention of a profile run is zero, as on a GPU; a CPU's leaves memory as it was, and a row may be all NaN."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    original = CPUAttentionBackendImpl.forward

    def forward(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        output = original(self, layer, *arguments, **named)
        return output.fill_(0) if arguments[4] is None else output  # of metadata

    patches.set(CPUAttentionBackendImpl, "forward", forward)


def patch_launches(patches: Patches, launched: Callable[[Any, Any, Any], None]) -> None:
    """Launches are steps of an open tape; `launched` is told of each: the kernel, its arguments."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        launched(self, args, kwargs)
        interpreted = partial(original, self, *args, grid=grid, warmup=warmup, **kwargs)
        return tape.launch(f"triton.{self.__name__}", interpreted, writes=tensors((args, kwargs)))

    patches.set(InterpretedFunction, "run", run)
