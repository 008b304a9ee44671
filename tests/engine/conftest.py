"""Real vLLM engines, one at a time, on the runner that SPECPLUGINS_RUNNER names: "v1" (default) or "v2".

Without a GPU, V2 runs through Triton's interpreter. The engines run in this process, so that tests can look inside.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shortened import first_layers
from torch.utils._pytree import tree_map_only

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
RUNNER = os.environ.get("SPECPLUGINS_RUNNER", "v1")
ALL = os.environ.get("SPECPLUGINS_TESTS") == "all"  # also those that take minutes; CI runs the others
# Methods of which, alone, a gate on the host decides; medusa is ours where it has heads.
GATED_ALONE = ("custom", *(("prompt_lookup", "suffix_lookup", "early_exit", "jump") if RUNNER == "v1" else ()))
INTERPRETED = RUNNER == "v2" and not torch.cuda.is_available()
NUM_PROMPTS = 30 if INTERPRETED else 50  # a step in the interpreter takes a tenth of a second
SOME, FEW = slice(0, 24, 3) if INTERPRETED else slice(0, 50, 4), slice(21, 29)
TAPES = INTERPRETED and os.environ.get("SPECPLUGINS_TAPES") != "0"  # CUDA graphs, streams and copies, simulated

DEMO_MODEL = EXAMPLES / "demo" / "model"
NUM_LAYERS = 8
SHARE_OF_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 29}
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
    from specplugins_triton_cpu.plugin import import_simulated_device

    import_simulated_device()
elif RUNNER == "v2":
    ENGINE_ENVIRONMENT["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ.update(ENGINE_ENVIRONMENT)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for the engines of this process alone


def long(*values: Any) -> Any:
    """A row of a table of tests that SPECPLUGINS_TESTS=all alone runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def long_on_v2(*values: Any) -> Any:
    """The same in the interpreter, where a row takes minutes; on V1 it runs in CI."""
    return long(*values) if INTERPRETED else pytest.param(*values)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out tests that are marked as long, unless SPECPLUGINS_TESTS=all."""
    for item in items:
        if not ALL and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="SPECPLUGINS_TESTS=all"))


@pytest.fixture(scope="session", autouse=INTERPRETED)
def v2_on_a_cpu() -> Iterator[None]:
    """What V2 lacks on a CPU; processes of their own get the interpreter from a plugin (triton_cpu). A start measures
    each size of a step once: it would take most of the time, for figures that `drafts_pay` replaces."""
    from launch_keys import recorded, variant
    from simulated_device.device import interpreted

    with interpreted(), pytest.MonkeyPatch.context() as patches:
        patches.setattr("vllm.v1.worker.gpu.spec_decode.adaptive_verification._PROFILE_REPLAYS", 1)
        patches.setattr("vllm_specplugins.engine.adaptive.budget._REPLAYS", 1)
        with recorded("vllm_specplugins.kernels", key_of=variant) as launched:
            LAUNCHED.append(launched)
            yield


LAUNCHED: list[set[Any]] = []  # the variants of our kernels that the newest engine has launched
FORMS: dict[Any, set[Any]] = {}  # the launches of an operation, by what its arguments are
ENGINES: list[tuple[str, Any, set[Any]]] = []  # the method of each engine of a file, its shapes, what it has launched


def note_launches(llm: Any) -> None:
    """Keeps what an engine has launched, for `launches_are_checked`."""
    from vllm_specplugins.engine.self_check import shapes_of

    config = llm.llm_engine.vllm_config
    for launched in LAUNCHED:
        if launched and hasattr(config.speculative_config, "plugin_config"):
            shapes = shapes_of(config)._replace(trims=True)  # a fault ends trimming after it has run
            ENGINES.append((config.speculative_config.plugin_config.method, shapes, set(launched)))


def note_launch(kernel: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Records the launches that a kernel would make, when its reference runs in its place."""
    from launch_keys import form_of, recorded, variant

    form = kernel.__module__, kernel.__name__, form_of((arguments, tuple(sorted(named.items()))))
    if form not in FORMS:
        copies = tree_map_only(torch.Tensor, torch.clone, (arguments, named))
        with recorded("vllm_specplugins.kernels", runs=False, key_of=variant) as launched:
            kernel(*copies[0], **copies[1])
        FORMS[form] = launched
    for launched in LAUNCHED:
        launched |= FORMS[form]


@pytest.fixture(scope="module", autouse=INTERPRETED)
def launches_are_checked() -> Iterator[None]:
    """Fails if an engine launches a variant of a kernel that neither its self-check nor test_compiled.py compiles. The
    self-check is recorded here, where no file has replaced a kernel by its reference.
    """
    from launch_keys import checked

    yield
    engines, ENGINES[:] = list(ENGINES), []
    unchecked = [(method, key) for method, shapes, launched in engines for key in launched - checked(shapes)]
    assert not unchecked, "\n".join(map(str, unchecked))


@pytest.fixture(scope="session", autouse=RUNNER == "v2")
def chosen_lengths() -> Iterator[None]:
    """The scheduler chooses lengths by a clock of a device whose steps take as long with any number of tokens: what a
    step takes in an interpreter says nothing. Most steps therefore draft K tokens, and trials fewer."""
    from simulated_device.clock import timed_steps

    with timed_steps(lambda num_tokens: 8.0):
        yield


@pytest.fixture
def whole_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step drafts K tokens, for tests of few steps that count drafts."""
    from vllm_specplugins.gate.step_times import StepTimes

    monkeypatch.setattr(StepTimes, "choose", lambda self, *_: self.lengths[-1])


@pytest.fixture(scope="module", autouse=TAPES)
def tapes(request: pytest.FixtureRequest, engine: Any, launches_are_checked: None) -> Iterator[None]:
    """Engines run on the simulated device and record graphs, but in files that say why not (WITHOUT_TAPES), and in the
    device's own, which switch it on. Our kernels are their references where a file is not about them (REAL_KERNELS).
    """
    engine.stop()
    if "test_simulated" in request.module.__name__ or hasattr(request.module, "WITHOUT_TAPES"):
        yield
        return
    from simulated_device.device import simulated_device
    from simulated_device.references import patch_kernels

    with simulated_device(is_cuda=True), pytest.MonkeyPatch.context() as patches:
        if not hasattr(request.module, "REAL_KERNELS"):
            patch_kernels(patches, note_launch)
        engine.records = True
        yield
        engine.records = False
        engine.stop()


@pytest.fixture(scope="session")
def plain(engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of both kinds and mixed lengths, and what the demo model emits without speculation."""
    from cases import PLAIN_TOKENS, generate, mixed_prompts

    prompts = mixed_prompts(str(DEMO_MODEL), NUM_PROMPTS)
    return prompts, generate(engine(), prompts, [8], max_tokens=PLAIN_TOKENS)


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest, plain: Any) -> list[list[int]]:
    """Those that a file's PROMPTS names, or of both kinds some."""
    return plain[0][getattr(request.module, "PROMPTS", SOME)]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, plain: Any) -> list[list[int]]:
    """What they are answered without speculation, NUM_TOKENS of it."""
    return [tokens[: request.module.NUM_TOKENS] for tokens in plain[1][getattr(request.module, "PROMPTS", SOME)]]


@pytest.fixture(scope="module")
def device(engine: Any, expected: Any) -> Iterator[Any]:
    """The simulated device, behind what its tests expect, which is made without it."""
    from simulated_device.device import simulated_device

    with simulated_device(is_cuda=True) as device:
        yield device
        engine.stop()


def graphs(sizes: Iterable[int] = (1, 8, 40)) -> dict[str, Any]:
    """Arguments of an engine that records decoding in graphs of so many tokens."""
    config = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(sizes)}
    return {"enforce_eager": False, "compilation_config": config}


def drawn_greedily(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that says so where it says nothing: the kernels that draw take up to a second a step here."""
    config = {
        name: [drawn_greedily(stage) for stage in value] if name == "stages" else value
        for name, value in config.items()
    }
    draws = {"early_exit", "jump"} | ({"medusa"} if "heads" in config else set())
    return {"draft_sample_method": "greedy", **config} if config.get("method") in draws else config


def shut_down(llm: Any) -> None:
    """Ends an engine of this process, so that another one can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    torch._dynamo.reset()
    # vLLM 0.32 registers its CPU kernels again for every engine of a process, and dies of it (AttributeError
    # in triton_utils/dispatcher.py) once xgrammar's module is loaded. Once is enough.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., Any]]:
    """engine(**arguments of LLM): the engine of these arguments; it replaces the last one if they differ."""
    from quick import leave_out, quick_starts, unfreeze

    alive: dict[str, Any] = {}
    quick_starts()

    def stop() -> None:
        if alive:
            note_launches(alive["llm"])
            last = weakref.ref(alive["llm"])
            shut_down(alive.pop("llm"))
            alive.clear()
            leave_out(last)

    def start(speculative_config: dict[str, Any] | None = None, **arguments: Any) -> Any:
        from recorded import drafts_pay, runner
        from vllm import LLM

        config = speculative_config or {}
        if config.get("method") in GATED_ALONE or (RUNNER == "v1" and "heads" in config):
            speculative_config = {"gate": "off", **config}  # on a small model drafts hardly pay
        if INTERPRETED and speculative_config:
            speculative_config = drawn_greedily(speculative_config)
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
            if start.records and not {"enforce_eager", "compilation_config"} & arguments.keys():
                defaults |= graphs()
            if torch.cuda.is_available():  # several test processes share the GPU
                defaults |= SHARE_OF_GPU
            else:  # a start fills the KV cache, a second for a GiB, and a capture puts back what stood there
                defaults["num_gpu_blocks_override"] = 256 if INTERPRETED else 512
            for launched in LAUNCHED:
                launched.clear()
            llm = LLM(**{**defaults, **arguments}, speculative_config=speculative_config)
            alive.update(llm=llm, key=key)
            if start.records and getattr(runner(llm), "adaptive_verification", None):
                drafts_pay(llm, token_ms=0.0)  # a simulation's times would trim at random
        return alive["llm"]

    start.stop, start.records = stop, False  # type: ignore[attr-defined]
    yield start
    stop()
    unfreeze()


def spec_metrics(llm: Any) -> dict[str, float]:
    """Returns vLLM's running totals about drafts and preemptions, by the last part of their names."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        "vllm:num_preemptions": "preemptions",
    }
    return {names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names}


def counted(llm: Any, run: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `run` returns, and how many draft tokens were verified meanwhile, and accepted."""
    before, result, after = spec_metrics(llm), run(), spec_metrics(llm)
    drafted, accepted = (int(after[name] - before[name]) for name in ("draft_tokens", "accepted_tokens"))
    return result, drafted, accepted
