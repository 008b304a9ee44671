"""What Triton's interpreter lacks for vLLM's kernels; its launches as the device's."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from simulated_device import tape
from simulated_device.operations import tensors
from simulated_device.patches import Patches
from simulated_device.quick_interpreter import quick_interpreter
from simulated_device.vllm_kernels import in_numpy


def patch_interpreter(patches: Patches) -> None:
    import triton.language as tl
    from triton.runtime import interpreter
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    builder = interpreter.InterpreterBuilder
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return masked_load(self, pointers, of_booleans(mask), *rest)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return masked_store(self, pointers, value, of_booleans(mask), *rest)

    def of_booleans(mask: Any) -> Any:  # a grammar's bits, and a product of conditions, are integers
        mask.data = np.asarray(mask.data, bool)  # nor is NumPy's scalar an array
        return mask

    patches.enter_context(quick_interpreter())
    patch_vllm_kernels(patches)
    patches.set(builder, "create_masked_load", create_masked_load)
    patches.set(builder, "create_masked_store", create_masked_store)
    patch_profile_run(patches)
    # vLLM takes residuals of a dense q with libdevice's log1p.
    patches.set(rejection_sampler_utils, "tldevice", SimpleNamespace(log1p=lambda x: tl.log(1.0 + x)))


def patch_vllm_kernels(patches: Patches) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup and (function := in_numpy(self)) is not None:
            return function(grid, *args, **kwargs)
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    patches.set(InterpretedFunction, "run", run)


def patch_profile_run(patches: Patches) -> None:
    """Attention of a profile run is zero, as on a GPU; a CPU's leaves memory as it was, and a row may be all NaN."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    original = CPUAttentionBackendImpl.forward

    def forward(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        output = original(self, layer, *arguments, **named)
        return output.fill_(0) if arguments[4] is None else output  # of metadata

    patches.set(CPUAttentionBackendImpl, "forward", forward)


def patch_launches(patches: Patches) -> None:
    """Launches are steps of an open tape."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        interpreted = partial(original, self, *args, grid=grid, warmup=warmup, **kwargs)
        return tape.launch(f"triton.{self.__name__}", interpreted, writes=tensors((args, kwargs)))

    patches.set(InterpretedFunction, "run", run)
