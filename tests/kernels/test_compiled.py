"""All kernels, compiled for GPUs that are not here: no spills, 16-byte loads.

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
MAX_NUM_DRAFT, NUM_SLOTS = 31, 1024  # of a default start
# At 8 warps, 80 leave room for three programs on a multiprocessor of 65,536: enough to hide the memory's latency.
MAX_REGISTERS = {"_scan_kernel": 64, "_draw_kernel": 64, "_weigh_kernel": 64, "_adjust_kernel": 64}
MAX_REGISTERS |= {"_match_kernel": 64, "_copy_kernel": 64, "_limit_kernel": 64, "_tally_kernel": 64}
MAX_REGISTERS |= {"_newest_kernel": 64, "_join_kernel": 64, "_worth_kernel": 64}
MAX_REGISTERS |= {"_try_kernel": 96}
MAX_REGISTERS |= {"_attend_kernel": 128, "_walk_kernel": 64, "_compact_kernel": 64}
# One program of 16 warps, which has a multiprocessor for itself, one of 4, and small ones.
MAX_REGISTERS |= {"_share_kernel": 128, "_observe_kernel": 128, "_predict_kernel": 64}
LIMITS = dict.fromkeys(("sm_90", "sm_100"), MAX_REGISTERS)
LIMITS["sm_80"] = MAX_REGISTERS | {"_draw_kernel": 80, "_weigh_kernel": 80}  # what truncates: three programs
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
TILE_SIZES |= {"_match_kernel": 2 * 1024}  # of tokens, in a text and in a reference
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
    from vllm_specplugins.kernels import inputs
    from vllm_specplugins.kernels.acceptance import Other, observe, predict, worth
    from vllm_specplugins.kernels.acceptance.reference import new_state
    from vllm_specplugins.kernels.budget import Layout, share_budget
    from vllm_specplugins.kernels.history_match import history_match
    from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
    from vllm_specplugins.kernels.rejection.adjust import adjust
    from vllm_specplugins.kernels.rejection.drafts import rated_sample
    from vllm_specplugins.kernels.rejection.inputs import as_step, make_batch, make_edits
    from vllm_specplugins.kernels.rejection.step import sample_step
    from vllm_specplugins.kernels.rounds.siblings import try_siblings
    from vllm_specplugins.kernels.steps import join, limit, newest, tally
    from vllm_specplugins.kernels.trees import attend, compact, walk
    from vllm_specplugins.kernels.trees import inputs as tree_inputs

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
        if not dense:  # a lookup's default
            batch = batch._replace(max_num_draft=MAX_NUM_DRAFT)
        rejection_sample(*batch, implementation="fused")
        if not dense:
            sample_step(*as_step(batch), implementation="fused")
        if not dense and dtype == torch.bfloat16:
            rated_sample(batch.target_logits, batch.positions, batch.sampling, implementation="fused")
        if not parameters and not dense:
            adjust(*batch[:5], make_edits(batch), 1, implementation="fused")
    history_match(*inputs.make_lookup(MAX_NUM_DRAFT), implementation="fused")
    share = next(inputs.make_budgets(NUM_SLOTS, MAX_NUM_DRAFT, NUM_SLOTS))
    share_budget(Layout(*torch.zeros(2, 1025, dtype=torch.int32)), *share, 1, "fused")
    rows, lengths, limits, max_tokens, num_draft, staged = inputs.make_step(NUM_SLOTS // 2, MAX_NUM_DRAFT)
    limit(rows, lengths, limits, max_tokens, num_draft, (), "fused")
    limit(rows, lengths, limits, max_tokens, num_draft, (31, 5), "fused")
    newest(num_draft, lengths, lengths.long(), (*torch.zeros(2, NUM_SLOTS), lengths.long()), "fused")
    for continues in (True, False):
        join(*inputs.make_chains(NUM_SLOTS // 2, MAX_NUM_DRAFT), continues, "fused")
    for stages in (None, staged, staged._replace(confirmed=None)):
        totals = inputs.new_totals(NUM_SLOTS, MAX_NUM_DRAFT, "cpu")
        tally(totals, rows, num_draft, num_draft, MAX_NUM_DRAFT, stages, "fused")
    width = MAX_NUM_DRAFT + 1
    attend(*tree_inputs.make_attention([(40, width)], (32, 8, 128), width, torch.bfloat16), implementation="fused")
    walk(*tree_inputs.make_walks(4, width), implementation="fused")
    zeros = torch.zeros(4, dtype=torch.int64)
    of_rows = (
        torch.zeros(2, 4, VOCAB_SIZE).unbind(0),
        zeros[:, None].expand(4, 3),
        zeros,
        Sampling(torch.ones(4), zeros),
    )
    try_siblings(*of_rows[0], *of_rows[1:], "fused")
    caches, moves = tree_inputs.make_moves([[0, 15]], torch.bfloat16, (8, 256), 1)
    compact(caches, torch.zeros(1, dtype=torch.uint64), *moves, "fused")
    for slots, drafts, sampled, rejected in inputs.make_outcomes(1, 8, 2, MAX_NUM_DRAFT):
        known = new_state(2, 17, MAX_NUM_DRAFT, "cpu")
        observe(known, slots, sampled, rejected, "fused")
        tables = tuple(torch.zeros(2, 17, MAX_NUM_DRAFT))
        predict(known, slots, drafts, torch.zeros(8, MAX_NUM_DRAFT), "fused", tables=tables)
        matches, table = drafts._replace(confidence=drafts.confidence.long()), torch.zeros(17, 1)
        worth(known, slots, matches, Other(1, 31, True, sampled), (table, 5), "fused")
        worth(known, slots, matches, None, None, "fused")
    return launches


def compile_launch(kernel, args, kwargs, target):
    """What Triton compiles when it launches this."""
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    chosen = {**options, "debug": False}
    options, signature, constants, attributes = kernel._pack_args(backend, chosen, bound, specialization, chosen)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


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


def report() -> None:
    """Compiles everything and prints a line of JSON for each kernel, specialisation and target."""
    from triton.backends.compiler import GPUTarget

    seen = set()
    for kernel, args, kwargs in record_launches():
        key = (kernel.fn.__name__, str([types_of(arg) for arg in args]))
        if key in seen:
            continue
        seen.add(key)
        for target, description in TARGETS.items():
            compiled = compile_launch(kernel, args, kwargs, GPUTarget(*description))
            resources = (amd_resources if description[0] == "hip" else cuda_resources)(compiled)
            logits = [arg.logits for arg in args if hasattr(arg, "logits")]
            logits += [arg.token_ids for arg in args if hasattr(arg, "distances")]
            # A scan reads one of the two, there by the same instructions.
            is_shared = kernel.fn.__name__ == "_scan_kernel" and target == "gfx942"
            itemsize = logits[0].itemsize if is_shared else sum(tensor.itemsize for tensor in logits)
            threads = kwargs["num_warps"] * description[2]
            line = {"kernel": kernel.fn.__name__, "target": target}
            line["bytes_wide"] = 16 * threads * resources["wide_loads"]
            print(json.dumps({**line, **resources, "itemsize": itemsize}), flush=True)


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
        assert line["registers"] <= LIMITS[target][line["kernel"]], line
        # All of the tiles' logits are loaded in 16 bytes at a time.
        assert line["bytes_wide"] >= TILE_SIZES.get(line["kernel"], 0) * line["itemsize"], line


if __name__ == "__main__":
    report()
