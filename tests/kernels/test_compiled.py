"""All launches of a server, compiled for GPUs that are not here: no spills, 16-byte loads.

The launches are those of the self-check (kernels/self_check.py) on small CPU tensors, with the sizes of a server;
tests/engine/conftest.py holds that engines launch nothing else. They are recorded and compiled in fresh processes,
because one that has Triton's interpreter cannot compile: with the oldest Triton that users have for one target, the
largest of them also for another target and with the installed one. Of the rest CI runs the front end alone.

    python tests/kernels/test_compiled.py 3.6.0 3.7.1 3.8.0   a table: all lengths of drafts, targets, versions
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "3.6.0"
VOCAB_SIZE, HEADS, NUM_SLOTS, LENGTHS = 128_256, (32, 8, 128), 1024, (31, 15, 8, 7, 5, 4)  # the first by default
# At 8 warps, 80 leave room for three programs on a multiprocessor of 65,536: enough to hide the memory's latency.
MAX_REGISTERS = {"_scan_kernel": 64, "_draw_kernel": 64, "_weigh_kernel": 64, "_adjust_kernel": 64}
MAX_REGISTERS |= {"_match_kernel": 64, "_copy_kernel": 64, "_limit_kernel": 64, "_tally_kernel": 64}
MAX_REGISTERS |= {"_newest_kernel": 64, "_join_kernel": 64, "_worth_kernel": 64}
MAX_REGISTERS |= {"_try_kernel": 96}
MAX_REGISTERS |= {"_attend_kernel": 128, "_walk_kernel": 64, "_compact_kernel": 64}
# One program of 16 warps, which has a multiprocessor for itself, one of 4, and small ones.
MAX_REGISTERS |= {"_share_kernel": 128, "_observe_kernel": 128, "_predict_kernel": 64}
LIMITS = {"sm_90": MAX_REGISTERS, "sm_100": MAX_REGISTERS.copy()}
LIMITS["sm_80"] = MAX_REGISTERS | {"_draw_kernel": 80, "_weigh_kernel": 80}  # what truncates: three programs
LIMITS["sm_80"]["_observe_kernel"] = 160  # two lengths of drafts need 158, 4 warps of which fit three times
LIMITS["sm_100"]["_share_kernel"] = 144  # one of 2 warps needs 139
# There a SIMD has 512, and two of a program's 8 warps: 64 leave room for four programs, 72 for three.
LIMITS["gfx942"] = {name: min(limit, 64) for name, limit in MAX_REGISTERS.items()}
LIMITS["gfx942"] |= {
    "_try_kernel": 96,
    "_weigh_kernel": 72,
    "_observe_kernel": 128,
    "_share_kernel": 128,
    "_attend_kernel": 168,
}
# Logits of each row that a program reads, where it does not choose some.
TILE_SIZES = {"_scan_kernel": 8192, "_adjust_kernel": 2048}
TILE_SIZES |= {"_match_kernel": 1024}  # of tokens, in a text and in a reference
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def servers(max_num_draft: int) -> Iterator[Any]:
    """Shapes of servers that launch everything between them."""
    import torch
    from vllm_specplugins.kernels.self_check import Shapes

    sizes: dict[str, Any] = {"max_num_draft": max_num_draft, "num_slots": NUM_SLOTS, "looks_up": True}
    drafts = {"samples": True, "trims": True, "heads": HEADS, "runs_target": True, "cascades": True}
    yield Shapes(VOCAB_SIZE, torch.bfloat16, **sizes, **drafts)
    yield Shapes(VOCAB_SIZE, torch.bfloat16, **sizes, samples=False)
    yield Shapes(VOCAB_SIZE, torch.float32, **{**sizes, "looks_up": False}, samples=False)  # of edited rows


def launch_edits() -> None:
    """What Model Runner V1 launches: only the edits that a batch has."""
    import torch
    from vllm_specplugins.kernels.rejection.adjust import Edits, adjust
    from vllm_specplugins.kernels.rejection.inputs import make_batch, make_edits

    batch = make_batch([1, 1], VOCAB_SIZE, dtype=torch.bfloat16)
    for name, edit in make_edits(batch)._asdict().items():
        adjust(*batch[:5], Edits(**{name: edit}), 1, "fused")


def record_launches(lengths: Sequence[int]) -> list:
    """(kernel, arguments, keyword arguments) of every launch, once for each specialisation."""
    from launch_keys import launch_checks
    from triton.runtime.jit import JITFunction

    launches: dict[str, Any] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        key = f"{self.fn.__name__} {types_of(args)} {sorted(kwargs.items())}"
        launches.setdefault(key, (self, args, kwargs))

    JITFunction.run = record
    for max_num_draft in lengths:
        for shapes in servers(max_num_draft):
            launch_checks(shapes)
    launch_edits()
    return list(launches.values())


def largest(launches: list) -> list:
    """Returns, for each kernel and type of logits, the launch with the largest number of arguments, and among these of
    rows."""
    best: dict[Any, Any] = {}
    for launch in launches:
        kernel, args, kwargs = launch
        types = str(types_of(args))
        key = kernel.fn.__name__, "torch.float32" in types, "torch.bfloat16" in types
        size = sum(not part.endswith("NoneType'>") for part in types.split(",")), kwargs.get("ROWS", 0)
        if key not in best or size > best[key][0]:
            best[key] = size, launch
    return [launch for _, launch in best.values()]


def compile_launch(kernel, args, kwargs, target, whole=True):
    """What Triton compiles when it launches this; if not `whole`, what its front end reads alone."""
    import triton
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    chosen = {**options, "debug": False}
    options, signature, constants, attributes = kernel._pack_args(backend, chosen, bound, specialization, chosen)
    source = ASTSource(kernel, signature, constants, attributes)
    if whole:
        return triton.compile(source, target=target, options=options.__dict__)
    ir.load_dialects(context := ir.context())
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return source.make_ir(target, options, functions, modules, context)


def types_of(value):
    """Of tensors their types, of tuples those of what is in them."""
    return [types_of(item) for item in value] if isinstance(value, tuple) else str(getattr(value, "dtype", type(value)))


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


def report(lengths: Sequence[int], whole: Sequence[str], others: Sequence[str]) -> None:
    """Compiles everything for some targets, for others the largest launches, of which it reads the rest. Prints a line
    of JSON for each."""
    from triton.backends.compiler import GPUTarget

    launches = record_launches(lengths)
    compiled = {id(launch) for launch in largest(launches)}
    for target in (*whole, *others):
        description = TARGETS[target]
        for launch in launches:
            kernel, args, kwargs = launch
            is_whole = target in whole or id(launch) in compiled
            line, began = {"kernel": kernel.fn.__name__, "target": target}, time.perf_counter()
            try:
                result = compile_launch(kernel, args, kwargs, GPUTarget(*description), is_whole)
            except Exception as error:
                print(json.dumps({**line, "error": f"{type(error).__name__}: {error}"[-500:]}), flush=True)
                continue
            if not is_whole:
                continue
            line |= {"seconds": round(time.perf_counter() - began, 2)}
            line |= (amd_resources if description[0] == "hip" else cuda_resources)(result)
            logits = [arg.logits for arg in args if hasattr(arg, "logits")]
            logits += [arg.token_ids for arg in args if hasattr(arg, "distances") or hasattr(arg, "starts")]
            # A scan and a lookup read one of two, there by the same instructions.
            is_shared = kernel.fn.__name__ in ("_scan_kernel", "_match_kernel") and target == "gfx942"
            line["itemsize"] = logits[0].itemsize if is_shared else sum(tensor.itemsize for tensor in logits)
            line["bytes_wide"] = 16 * kwargs["num_warps"] * description[2] * line["wide_loads"]
            print(json.dumps(line), flush=True)


def folder_of(version: str) -> Path | None:
    """Where this Triton is, alone; None if it cannot be downloaded. The installed one is in no folder of its own."""
    folder = ROOT / ".cache" / f"triton-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", f"triton=={version}"]
        if subprocess.run([*pip, "--target", part := folder.with_suffix(".part")], capture_output=True).returncode:
            return None
        part.rename(folder)
    return folder


def reported(
    whole: str, others: str = "", lengths: Sequence[int] = LENGTHS[:1], version: str | None = None
) -> list[dict[str, Any]]:
    """What a fresh process reports for these targets, with the installed Triton or one of this version."""
    arguments = f"--whole={whole}", f"--others={others}", f"--lengths={','.join(map(str, lengths))}"
    return [json.loads(line) for line in in_process(__file__, *arguments, version=version)]


def in_process(*arguments: Any, version: str | None = None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    if version is not None:
        if (folder := folder_of(version)) is None:
            sentence = f"Triton {version} cannot be downloaded here."
            pytest.fail(sentence) if os.environ.get("CI") else pytest.skip(sentence)
        environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(lines: list[dict[str, Any]], target: str) -> None:
    lines = [line for line in lines if line["target"] == target]
    assert {line["kernel"] for line in lines} == MAX_REGISTERS.keys()
    for line in lines:
        assert "error" not in line, line
        assert line["spilled"] == 0, line
        assert line["registers"] <= LIMITS[target][line["kernel"]], line
        # All of the tiles' logits are loaded in 16 bytes at a time.
        assert line["bytes_wide"] >= TILE_SIZES.get(line["kernel"], 0) * line["itemsize"], line


@pytest.mark.parametrize("version, target", [(OLDEST, "sm_90"), (None, "gfx942")])
def test_resources(version: str | None, target: str) -> None:
    """Kills: what newer front ends of Triton take alone, in any launch; a tile that does not fit in the registers; a
    mask or a stride that makes loads narrow.
    """
    check(reported("", target, version=version), target)


PLANTED = """
import torch, triton, triton.language as tl
from test_compiled import TARGETS, compile_launch
from triton.backends.compiler import GPUTarget

@triton.jit
def sound(out_ptr, pairs):
    tl.store(out_ptr, tl.load(pairs[0][0]))

@triton.jit
def nested_target(out_ptr, pairs):
    (a_ptr, b_ptr), c_ptr = pairs
    tl.store(out_ptr, tl.load(a_ptr))

@triton.jit
def none_in_a_tuple(out_ptr, pairs):
    if pairs is not None:
        tl.store(out_ptr, tl.load(pairs[0][0]))

@triton.jit
def newer_function(out_ptr, pairs):
    tl.atomic_store(out_ptr, tl.load(pairs[0][0]))

x = torch.zeros(4)
for kernel, last in (sound, x), (nested_target, x), (none_in_a_tuple, None), (newer_function, x):
    try:
        compile_launch(kernel, (x, ((x, x), last)), {"num_warps": 1}, GPUTarget(*TARGETS["sm_90"]))
        print(kernel.__name__, "compiles")
    except Exception:
        print(kernel.__name__, "fails")
"""


def test_planted(tmp_path: Path) -> None:
    """Fails if a process compiles with another Triton than it reports, or does not read kernels as users' processes
    do."""
    (file := tmp_path / "planted.py").write_text(PLANTED)
    found = dict(line.split() for line in in_process(file, version=OLDEST))
    assert found == {name: "fails" for name in found} | {"sound": "compiles"} and len(found) == 4


def test_every_configuration() -> None:
    """Kills: a check of some configuration that is no server's, so that nothing compiles it."""
    import torch
    from launch_keys import checked
    from vllm_specplugins.kernels.self_check import Shapes

    compiled = set[Any]().union(*map(checked, servers(2)))
    asked = {"looks_up": True, "trims": True, "heads": HEADS, "runs_target": True, "cascades": True}
    for samples, without in itertools.product((True, False), (*asked, None)):
        options = {name: value for name, value in asked.items() if name != without}
        shapes = Shapes(300, torch.float32, 2, samples, **options)
        assert checked(shapes) <= compiled, shapes


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        whole, others, lengths = (part.split("=")[1].split(",") for part in sys.argv[1:])
        report([int(length) for length in lengths], *([name for name in names if name] for names in (whole, others)))
    for version in sys.argv[1:]:
        if not version.startswith("--"):
            for line in reported(",".join(TARGETS), lengths=LENGTHS, version=version):
                print(version, line, flush=True)
