"""A device that does nothing: what the host does in a step of Model Runner V2 is real, what a device would do is not.

Real: the engine core, scheduler, worker and runner, torch's dispatcher (on small tensors of the CPU), Triton's own path
to a launch (binder, specialisation, cache key). Not run: kernels, replays of graphs, the model outside of them, waits.
What the kernels would have left, as many tokens sampled and rejected, is put there, and the time for that taken out.
"""

import contextlib
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "specplugins",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SPECPLUGINS_SELF_CHECK": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
}  # fmt: skip
counts: Counter[str] = Counter()  # of launches, replays, copies and waits
excluded_ns = 0  # of this thread: what no host does
num_draft = 0  # K of the steps that verify


def put_in_place() -> None:
    """Once in a process, before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(TESTS), str(TESTS / "engine" / "triton_cpu")]
    _replace_launches()
    _replace_device()


def excluded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose time does not count."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        global excluded_ns
        begin = time.thread_time_ns()
        with torch.inference_mode():
            result = function(*args, **kwargs)
        excluded_ns += time.thread_time_ns() - begin
        return result

    return call


def _replace_launches() -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit

    rows, seen = torch.arange(4096, dtype=torch.int32) * 5, Counter[str]()

    def sample(num_sampled: Any, num_rejected: Any, most: int) -> None:
        """Every number from 1 to K + 1 in turn, another for each row."""
        seen["steps"] += 1
        num_sampled.copy_((rows[: len(num_sampled)] + seen["steps"]) % (most + 1) + 1)
        num_rejected.zero_()  # the scheduler counts by itself

    def verify(**arguments: Any) -> None:
        seen["drafts"] = num_draft

    def sample_theirs(num_sampled_ptr: Any, num_rejected_ptr: Any, **arguments: Any) -> None:
        sample(num_sampled_ptr, num_rejected_ptr, seen.pop("drafts", 0))

    def sample_ours(result: Any, **arguments: Any) -> None:
        if result.num_rejected is not None:
            sample(result.num_sampled, result.num_rejected, result.sampled.shape[1] - 1)

    def zero(*names: str) -> Callable[..., None]:
        return lambda **arguments: [arguments[name].zero_() for name in names]  # type: ignore[func-returns-value]

    hooks: dict[str, Callable[..., None]] = {
        "_gather_draft_sampled_kernel": verify,
        "_get_num_sampled_and_rejected_kernel": sample_theirs,
        "_draw_kernel": sample_ours,
        # What later code indexes with must be in range.
        "_combine_sampled_and_draft_tokens_kernel": zero("logits_indices_ptr"),
        "_expand_idx_mapping_kernel": zero("expanded_idx_mapping_ptr", "expanded_local_pos_ptr"),
        "_share_kernel": lambda layout, num_rows, **arguments: layout.query_start_loc.fill_(num_rows),
    }

    def compiled(self: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        names, before = self.arg_names, 9  # of a launch's arguments are no kernel's
        hook = excluded(hooks[self.__name__]) if self.__name__ in hooks else None

        def launch(*arguments: Any) -> None:
            counts["launches"] += 1
            if hook is not None:
                hook(**dict(zip(names, arguments[before:], strict=True)))

        kernel = SimpleNamespace(run=launch, function=0, packed_metadata=(), launch_metadata=lambda *args: None)
        self.device_caches[device][0][key] = kernel
        return kernel

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cuda, get_device_capability=lambda *args: (9, 0), is_active=lambda: True,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    jit.JITFunction._do_compile = compiled


class Event:
    """torch.cuda.Event: everything has happened."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        counts["events"] += 1

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts["waits"] += 1

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class Stream(contextlib.nullcontext[None]):
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        import torch

        super().__init__()
        self.device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None: ...

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    synchronize = Event.synchronize


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None: ...

    def replay(self) -> None:
        counts["replays"] += 1

    def reset(self) -> None: ...


def _replace_device() -> None:
    import torch
    import vllm.v1.worker.cpu_worker  # noqa: F401  # puts placeholders into torch.cuda; ours come after
    import vllm_specplugins.kernels.implementations  # noqa: F401  # before the kernels, which hold its function
    from simulated_device.patches import Patches
    from simulated_device.vllm_cpu import patch_asynchronous, patch_platform
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import cpu_attn

    default, patches = Stream(), Patches()  # for good
    for name, value in {
        "CUDAGraph": Graph, "graph": lambda *args, **options: contextlib.nullcontext(), "Stream": Stream,
        "Event": Event, "current_stream": lambda device=None: default, "default_stream": lambda device=None: default,
        "set_stream": lambda stream: None, "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 0), "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch.accelerator.synchronize = lambda device=None: None
    patch_asynchronous(patches)
    patch_platform(patches)
    # No launch writes the slots that other operations index with.
    steps = importlib.import_module("vllm_specplugins.kernels.steps.fused")
    steps.torch = SimpleNamespace(**{**vars(torch), "empty_like": torch.zeros_like})
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    builder = cpu_attn.CPUAttentionMetadataBuilder
    builder._cudagraph_support, builder.supports_draft_decode_metadata_update = AttentionCGSupport.ALWAYS, True
    builder.update_draft_decode_metadata = lambda self, metadata: None
    for name in ("cpu_attention_with_kv_cache", "cpu_attn_get_scheduler_metadata", "cpu_attn_reshape_and_cache"):
        setattr(ops, name, lambda *args, **kwargs: None)
    embed = UnquantizedEmbeddingMethod.embedding  # what no kernel has written is any number
    UnquantizedEmbeddingMethod.embedding = lambda self, layer, ids: embed(self, layer, torch.zeros_like(ids))
    _replace_worker()
    replace_imported()


def _replace_worker() -> None:
    """What the GPU's worker does at the start, and the CPU's does not."""
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    init_device, warm = CPUWorker.init_device, CPUWorker.compile_or_warm_up_model

    def init(self: Any) -> None:
        if not is_workspace_manager_initialized():
            init_workspace_manager(torch.device("cpu"), 1)
        init_device(self)

    def compile_or_warm_up_model(self: Any) -> Any:
        times = warm(self)
        if self.model_runner.needs_cudagraph_capture():
            self.model_runner.capture_model()
        return times

    CPUWorker.init_device, CPUWorker.compile_or_warm_up_model = init, compile_or_warm_up_model
    CPUWorker._should_warm_up_model = lambda self: False


def replace_imported() -> None:
    """Functions that modules hold; again when more of them have been imported."""
    import numpy as np
    import torch

    def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
        """As on a GPU: a copy into pinned memory, and one to the device."""
        counts["copies to the device"] += 1
        dtype = out.dtype if dtype is None and out is not None else dtype
        data = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
        if isinstance(data, torch.Tensor):
            pinned = torch.empty(data.shape, dtype=dtype or data.dtype).copy_(data)
        else:
            pinned = torch.tensor(data, dtype=dtype)
        return out.copy_(pinned) if out is not None else pinned.to(dtype=dtype, copy=True)

    def implementation_of(logits: Any, max_draft: str | None, on_cpu: str = "reference") -> str:
        return max_draft or "fused"

    stream = Stream()
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not name.startswith(("vllm.", "vllm_specplugins")):
            continue
        for own in (async_tensor_h2d, implementation_of):
            if own.__name__ in vars(module):
                setattr(module, own.__name__, own)
        if "current_stream" in vars(module) and name.startswith(("vllm.utils.torch_utils", "vllm.v1.worker.gpu")):
            module.current_stream = lambda: stream
