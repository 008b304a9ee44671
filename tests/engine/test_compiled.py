"""Layers that draft where vLLM compiles its models: a cut body runs code of its own, fresh and from vLLM's cache on
disk."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import mixed_prompts
from conftest import DEMO_MODEL, RUNNER, first_layers
from forked import run
from parts import write_head

from vllm_specplugins.engine.target import compiled

ONCE = pytest.mark.skipif(RUNNER == "v2", reason="too slow through Triton's interpreter")
# vLLM's CPU platform compiles without the backend that it has for GPUs: pieces between attention, and the cache.
PROGRAM = """
import json, sys
import torch
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.platforms.cpu import CpuPlatform

check, layer = CpuPlatform.check_and_update_config.__func__, LlamaDecoderLayer.forward
arguments, prompts, num_tokens = json.loads(sys.argv[1])

def check_and_update_config(cls, vllm_config):
    check(cls, vllm_config)
    config = vllm_config.compilation_config
    config.mode, config.compile_sizes, config.splitting_ops = CompilationMode.VLLM_COMPILE, [], config._attention_ops

def eager(*args, **kwargs):
    raise AssertionError("a layer runs eagerly")

def answer(llm, **options):
    params = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**params, extra_args={"specplugins": options})
    before = llm.collective_rpc("specplugins_stats")[0]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    after = llm.collective_rpc("specplugins_stats")[0]
    counts = {name: after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens")}
    for name, stage in after["stages"].items():
        counts |= {f"{name} {count}": stage[count] - before["stages"][name][count] for count in ("drafted", "kept")}
    return [[list(output.outputs[0].token_ids) for output in outputs], counts]

def start(cold):
    llm = LLM(**arguments)
    LlamaDecoderLayer.forward = eager
    result = {"compiled": answer(llm)}
    if cold:
        result["plain"] = answer(llm, enabled=False)
        LlamaDecoderLayer.forward = layer
        llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.adapter.first_layers._run.clear()
        result["eager"] = answer(llm)
    result["faults"] = llm.collective_rpc("specplugins_stats")[0]["faults"]
    result["code"] = [compilation_counter.num_aot_artifacts_saved, compilation_counter.num_aot_artifacts_loaded]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # once is enough: see conftest.py
    return result

CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
FixFunctionalizationPass.__call__ = lambda self, graph: None  # names kernels that only GPUs have
print("RESULT", json.dumps([start(cold) for cold in (True, False)]))
"""
NUM_LAYERS = 3
NUM_TOKENS = 21  # one from the prompt and four whole steps of K + 1, so that no draft is cut


@ONCE
@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """A jump after one layer, checked by the first and the last layer, and these by all, in two engines of which the
    second finds all code on disk. Kills: the body's code for a cut, one cut's for another, or a cut's for the body, in
    memory or from the cache; a norm that is compiled in; a draft token of a type that was not compiled for; late layers
    that stay eager, or are fed with tokens in place of states.
    """
    model = str(first_layers(DEMO_MODEL, NUM_LAYERS))
    stages = [
        {"method": "jump", "head": write_head(tmp_path / "head", 1, 1, 0.01, num_layers=NUM_LAYERS)["head"]},
        {"method": "early_exit", "layers": [0, NUM_LAYERS - 1]},
        {"method": "early_exit", "exit_layer": NUM_LAYERS},
    ]
    arguments = {
        "model": model,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "block_size": 32,
        "compilation_config": {"inductor_compile_config": {"cpp_cache_precompile_headers": False}},
        "speculative_config": {
            "method": "cascade",
            "policy": "verify",
            "num_speculative_tokens": 4,
            "gate": "off",
            "stages": stages,
        },
    }
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    asked = json.dumps([arguments, mixed_prompts(model, 8), NUM_TOKENS])
    done = run([program, asked], {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    cold, warm = json.loads(lines[0].removeprefix("RESULT "))
    outputs, counts = cold["compiled"]
    assert outputs == cold["plain"][0]
    assert cold["plain"][1]["drafted_tokens"] == 0
    assert counts["drafted_tokens"] == counts["accepted_tokens"] == len(outputs) * (NUM_TOKENS - 1) * 4 // 5
    assert 0 < counts["0 jump kept"] < counts["0 jump drafted"]
    assert cold["eager"] == warm["compiled"] == cold["compiled"], "the same tokens, of the same stages"
    assert cold["code"] == [5, 0] and warm["code"] == [5, 5], "the target's and four cuts', stored and then loaded"
    assert cold["faults"] == warm["faults"] == {}


def test_compiler_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Costs the compiled code, and one sentence."""

    def no_compiler(*args: Any) -> Any:
        raise RuntimeError("there is no g++\nand more")

    monkeypatch.setattr(compiled, "_compile", no_compiler)
    cut = SimpleNamespace(forward=torch.neg)
    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        assert compiled.compile_cut(cut, "layers_0_1") is torch.neg
    assert [record.message for record in caplog.records] == [
        "torch.compile failed for layers_0_1 (RuntimeError: there is no g++). "
        "Drafting runs it without compilation and is slower."
    ]
