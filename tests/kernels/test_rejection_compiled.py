"""Every kernel of verification compiled for GPUs that are not here: no spills, few registers, loads of 16 bytes.

The launchers run on small CPU tensors; what they would launch is recorded and compiled. A fresh process, because one
that has Triton's interpreter cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

VOCAB_SIZE = 128_256
# At 8 warps, 80 leave room for three programs on a multiprocessor of 65,536: enough to hide the memory's latency.
MAX_REGISTERS = {"_draw_kernel": 80, "_scan_kernel": 64, "_draw_kept_kernel": 64, "_weigh_kernel": 64}
MAX_REGISTERS |= {"_accept_kernel": 48, "_keep_kernel": 80, "_adjust_kernel": 64}
# Logits of each row that a program reads, where it does not choose some.
TILE_SIZES = {"_draw_kernel": 8192, "_scan_kernel": 8192, "_keep_kernel": 8192, "_adjust_kernel": 2048}
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def record_launches() -> list:
    """(kernel, arguments, keyword arguments) of every launch of every variant, once for each specialisation."""
    import torch
    from triton.runtime.jit import JITFunction
    from vllm_specplugins.kernels.rejection import rejection_sample
    from vllm_specplugins.kernels.rejection.adjust import adjust
    from vllm_specplugins.kernels.rejection.adjust.testing import make_edits
    from vllm_specplugins.kernels.rejection.block import block_rejection_sample
    from vllm_specplugins.kernels.rejection.testing import make_batch

    launches: list = []
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append((self, args, kwargs))
    truncated = {
        "top_k": torch.full((4,), 50, dtype=torch.int32),
        "top_p": torch.full((4,), 0.9),
        "min_p": torch.zeros(4),
    }
    variants = [(torch.bfloat16, False, {}), (torch.bfloat16, False, truncated), (torch.bfloat16, True, {})]
    for dtype, dense, parameters in [*variants, (torch.bfloat16, True, truncated), (torch.float32, False, {})]:
        batch = make_batch([1, 1], VOCAB_SIZE, dense=dense, dtype=dtype, **parameters)
        rejection_sample(*batch, implementation="fused")
        if not parameters:
            block_rejection_sample(*batch, implementation="fused")
        if not parameters and not dense:
            adjust(*batch[:5], make_edits(batch), 1, implementation="fused")
    return launches


def compile_launch(kernel, args, kwargs, target):
    """What Triton compiles when it launches this."""
    import torch
    import triton
    from triton.compiler import ASTSource

    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
    constants, attributes = {}, {}

    def signature_of(value, path, is_constexpr):
        if isinstance(value, tuple):
            return tuple(signature_of(item, (*path, place), is_constexpr) for place, item in enumerate(value))
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and (is_constexpr or not isinstance(value, int) or value == 1):
            constants[path] = value
            return "constexpr"
        if is_tensor or value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "*" + types[value.dtype] if is_tensor else "i32"

    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature = {
        name: signature_of(values[name], (place,), kernel.params[place].is_constexpr)
        for place, name in enumerate(kernel.arg_names)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": kwargs["num_warps"]})


def cuda_resources(compiled) -> dict:
    tools = Path(sys.modules["triton"].__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run([tools / "cuobjdump", "-res-usage", cubin.name], capture_output=True, text=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "spilled": int(re.search(r"LOCAL:(\d+)", text)[1]),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", compiled.asm["ptx"])),
    }


def amd_resources(compiled) -> dict:
    text = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1]),
        "spilled": int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text)[1]),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
    }


def report() -> None:
    """Compiles everything and prints a line of JSON for each kernel, specialisation and target."""
    from triton.backends.compiler import GPUTarget

    seen = set()
    for kernel, args, kwargs in record_launches():
        key = (kernel.fn.__name__, *(str(getattr(arg, "dtype", type(arg))) for arg in args))
        if key in seen:
            continue
        seen.add(key)
        for target, description in TARGETS.items():
            compiled = compile_launch(kernel, args, kwargs, GPUTarget(*description))
            found = (amd_resources if description[0] == "hip" else cuda_resources)(compiled)
            values = dict(zip(kernel.arg_names, args, strict=False))
            logits = [values.get(name) for name in ("logits_ptr", "draft_logits_ptr")]
            itemsize = sum(tensor.itemsize for tensor in logits if tensor is not None)
            threads = kwargs["num_warps"] * description[2]
            line = {"kernel": kernel.fn.__name__, "target": target, "bytes_wide": 16 * threads * found["wide_loads"]}
            print(json.dumps({**line, **found, "itemsize": itemsize}), flush=True)


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_resources(target: str, compiled: list[dict]) -> None:
    """Kills: a tile that does not fit in the registers; a mask or a stride that makes loads narrow."""
    kernels = [line for line in compiled if line["target"] == target]
    assert {line["kernel"] for line in kernels} == MAX_REGISTERS.keys()
    for line in kernels:
        assert line["spilled"] == 0, line
        assert line["registers"] <= MAX_REGISTERS[line["kernel"]], line
        # All of the tiles' logits are loaded in 16 bytes at a time.
        assert line["bytes_wide"] >= TILE_SIZES.get(line["kernel"], 0) * line["itemsize"], line


if __name__ == "__main__":
    report()
