"""Real vLLM engines, one at a time, on the runner that SPECPLUGINS_RUNNER names: "v1" (default) or "v2".

Without a GPU, V2 runs through Triton's interpreter. The engines run in this process, so that tests can look inside.
"""

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
RUNNER = os.environ.get("SPECPLUGINS_RUNNER", "v1")
INTERPRETED = RUNNER == "v2" and not torch.cuda.is_available()


def first_layers(model: Path, num_layers: int) -> Path:
    """A checkpoint of a model's first layers, in a new folder; the demo model is trained to be usable so."""
    out = Path(tempfile.mkdtemp(prefix="specplugins-model-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    shutil.copytree(model, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    dropped = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
    weights = load_file(out / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


DEMO_MODEL = EXAMPLES / "demo" / "model"
NUM_LAYERS = 8
if INTERPRETED:  # a layer costs some ten milliseconds a step there
    NUM_LAYERS = 2
    DEMO_MODEL = first_layers(DEMO_MODEL, NUM_LAYERS)
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
if INTERPRETED:
    paths = [str(HERE / "triton_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ENGINE_ENVIRONMENT |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    sys.path.insert(0, str(HERE / "triton_cpu"))
elif RUNNER == "v2":
    ENGINE_ENVIRONMENT["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ.update(ENGINE_ENVIRONMENT)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for the engines of this process alone
sys.path.insert(0, str(EXAMPLES / "demo"))
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "proposers"))


@pytest.fixture(scope="session", autouse=INTERPRETED)
def asynchronous_scheduling_on_cpu() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off for every runner; V2 can do it there, too."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@pytest.fixture(scope="session", autouse=INTERPRETED)
def names_that_the_interpreter_patches() -> None:
    """Triton's interpreter looks for the builtins of its language in every call of a kernel, a quarter of its time."""
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in names:
            names[package] = [name for name in dir(package) if is_builtin(getattr(package, name))]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # not so inside of another call, which has patched it already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@pytest.fixture(scope="session", autouse=INTERPRETED)
def log1p_in_the_interpreter() -> None:
    """vLLM takes residuals of a dense q with libdevice's log1p, which Triton's interpreter does not have."""
    import triton.language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., Any]]:
    """engine(**arguments of LLM): the engine of these arguments; it replaces the last one if they differ."""
    alive: dict[str, Any] = {}

    def stop() -> None:
        if alive:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            alive.pop("llm").llm_engine.engine_core.shutdown()
            alive.clear()
            cleanup_dist_env_and_memory()
            torch._dynamo.reset()
            gc.collect()
            # vLLM 0.32 registers its CPU kernels again for every engine of a process, and dies of it (AttributeError
            # in triton_utils/dispatcher.py) once xgrammar's module is loaded. Once is enough.
            from vllm.platforms import current_platform

            type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

    def start(speculative_config: dict[str, Any] | None = None, **arguments: Any) -> Any:
        from vllm import LLM

        key = repr((speculative_config, sorted(arguments.items())))
        if alive.get("key") != key:
            stop()
            defaults: dict[str, Any] = {
                "model": str(DEMO_MODEL),
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "enforce_eager": True,
                "disable_log_stats": False,
                "enable_prefix_caching": False,
                "block_size": 32,
            }
            llm = LLM(**{**defaults, **arguments}, speculative_config=speculative_config)
            alive.update(llm=llm, key=key)
        return alive["llm"]

    yield start
    stop()


def spec_metrics(llm: Any) -> dict[str, float]:
    """vLLM's own running totals about drafts, and of preemptions, by the last part of their names."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        "vllm:num_preemptions": "preemptions",
    }
    return {names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names}
