"""vLLM's CPU platform, attention and worker as ones of a device that has graphs."""

from functools import partial
from typing import Any
from weakref import ref

import torch

from simulated_device import tape
from simulated_device.guard import DeviceError, Guard
from simulated_device.patches import Patches
from simulated_device.streams import streams

_STARTS = ("init_device", "load_model", "determine_available_memory", "initialize_from_config")
_STEPS = ("execute_model", "sample_tokens")


def patch_asynchronous(patches: Patches) -> None:
    """This platform takes away asynchronous scheduling, and graphs' sizes, and its events cannot be asked. V2 can."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu import shm

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        asynchronous = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.compilation_config.cudagraph_capture_sizes = sizes
        vllm_config.scheduler_config.async_scheduling = asynchronous

    patches.set(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    patches.set(shm._EventPlaceholder, "query", lambda self: True)


def patch_platform(patches: Patches) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    # vLLM's kernel for top-k and top-p converts constants as the interpreter cannot.

    def limit(logits: Any, k: Any, p: Any, **hints: Any) -> Any:  # vLLM 0.33 says which rows to expect
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=False)

    patches.set(topk_topp_sampler, "apply_top_k_top_p_triton", limit)
    assign = adaptive_verification._assign_draft_token_budget
    patches.set(adaptive_verification, "_assign_draft_token_budget_compiled", assign)  # compiling it takes a minute
    patches.set(CpuPlatform, "support_static_graph_mode", classmethod(lambda cls: True))
    patches.set(CpuPlatform, "graph_pool_handle", classmethod(lambda cls: (0, 0)))


def patch_attention(patches: Patches, guard: Guard) -> None:
    """The CPU's attention kernel as one that makes its own plan on the device. vLLM plans the work of its threads on
    the host, for the lengths of one step. Here planning is part of the kernel, which then depends on nothing but
    tensors: a graph of it replays for any batch that is not larger.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import cpu_attn

    attend, make_plan = ops.cpu_attention_with_kv_cache, ops.cpu_attn_get_scheduler_metadata

    def launch(**arguments: Any) -> None:
        kernel = partial(_attend, attend, make_plan, arguments)
        tape.launch("cpu_attention_with_kv_cache", kernel, writes=[arguments["output"]])

    builder = cpu_attn.CPUAttentionMetadataBuilder
    patches.set(ops, "cpu_attention_with_kv_cache", launch)
    patches.set(ops, "cpu_attn_get_scheduler_metadata", lambda **arguments: None)
    patches.set(builder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    patches.set(builder, "supports_draft_decode_metadata_update", True)
    patches.set(builder, "update_draft_decode_metadata", lambda self, metadata: None)


def _attend(attend: Any, make_plan: Any, arguments: dict[str, Any]) -> None:
    from vllm import envs
    from vllm.v1.attention.backends import cpu_attn

    query, key_cache = arguments["query"], arguments["key_cache"]
    starts, seq_lens = arguments["query_start_loc"], arguments["seq_lens"]
    rows = torch.nonzero((seq_lens > 0) & (starts[1:] > starts[:-1]))
    if len(rows) == 0:
        return
    num_reqs = int(rows[-1]) + 1  # padding comes last
    num_tokens = int(starts[num_reqs])
    starts, seq_lens = starts[: num_reqs + 1], seq_lens[:num_reqs]
    plan = make_plan(
        num_reqs=num_reqs,
        num_heads=query.shape[1],
        num_kv_heads=key_cache.shape[1],
        head_dim=query.shape[2],
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=arguments["causal"],
        sliding_window_size=arguments["sliding_window"],
        isa=cpu_attn._get_attn_isa(query.dtype, key_cache.shape[2], query.shape[2], arguments["kv_cache_dtype"]),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=arguments["dynamic_causal"],
        kv_cache_dtype=arguments["kv_cache_dtype"],
    )
    own = {"query_start_loc": starts, "seq_lens": seq_lens, "scheduler_metadata": plan}
    own |= {name: arguments[name][:num_tokens] for name in ("query", "output")}
    attend(**{**arguments, **own, "block_table": arguments["block_table"][:num_reqs]})


def patch_copies(patches: Patches, guard: Guard) -> None:
    """What this platform's vLLM does without a copy, because its device is the host."""
    from vllm.utils import torch_utils
    from vllm.v1 import outputs
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

    without_copy, make_uva = torch_utils.async_tensor_h2d, UvaBuffer.__init__

    def async_tensor_h2d(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            result = without_copy(data, device, dtype, out)
            result = result if out is not None else result.clone()
        guard.memory.claim(result)
        return result

    def to_cpu_nonblocking(self: Any) -> Any:
        boundaries = self.cu_num_generated_tokens_tensor
        return outputs.LogprobsTensors(
            self.logprob_token_ids.to("cpu", non_blocking=True),
            self.logprobs.to("cpu", non_blocking=True),
            self.selected_token_ranks.to("cpu", non_blocking=True),
            self.cu_num_generated_tokens,
            None if boundaries is None else boundaries.to("cpu", non_blocking=True),
        )

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        make_uva(self, *args, **kwargs)
        guard.memory.share(self.cpu)

    patches.set_in_modules("vllm", "async_tensor_h2d", async_tensor_h2d)
    patches.set(outputs.LogprobsTensors, "to_cpu_nonblocking", to_cpu_nonblocking)
    patches.set(UvaBuffer, "__init__", make)
    patches.set(torch_utils, "current_stream", streams.current)
    patches.set_in_modules("vllm.v1.worker.gpu.", "current_stream", streams.current)


def patch_worker(patches: Patches, guard: Guard, warm_up: bool) -> None:
    """What the GPU's worker does and the CPU's does not; and the guard around all that it does."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    from vllm_specplugins.engine import self_check
    from vllm_specplugins.engine.worker import _WithProposer

    if warm_up:  # ours, too
        patches.set(CPUWorker, "_should_warm_up_model", lambda self: True)
        patches.set(self_check, "device", lambda: torch.device("cpu"))
    methods = {name: getattr(CPUWorker, name) for name in (*_STARTS, *_STEPS)}

    def starting(method: Any) -> Any:
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            with guard.active():
                return method(self, *args, **kwargs)

        return guarded

    def serving(method: Any) -> Any:
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            with guard.active(), guard.ledger.step(ends=method is methods["sample_tokens"]):
                return method(self, *args, **kwargs)

        return guarded

    def profiled(measure: Any) -> Any:
        def determine_available_memory(self: Any) -> Any:
            if self.vllm_config.additional_config.get("profiles"):
                with guard.active():
                    _profile(self)
            return measure(self)

        return determine_available_memory

    warm = CPUWorker.compile_or_warm_up_model

    def init_device_and_workspace(self: Any) -> None:
        if not is_workspace_manager_initialized():
            init_workspace_manager(torch.device("cpu"), 1)
        init_device(self)

    def compile_or_warm_up_model(self: Any) -> Any:
        with guard.active():
            times = warm(self)
            if warm_up:
                warmup_kernels(self.model_runner, *(partial(methods[name], self) for name in _STEPS))
            if self.model_runner.needs_cudagraph_capture():
                taken = self.model_runner.capture_model()
                if taken != (estimate := getattr(self, "cudagraph_memory_estimate", taken)):
                    raise DeviceError(f"graphs take {taken} bytes, and the profile's estimate is {estimate}")
        return times

    for name, method in methods.items():
        patches.set(CPUWorker, name, (serving if name in _STEPS else starting)(method))
    patches.set(CPUWorker, "determine_available_memory", profiled(CPUWorker.determine_available_memory))
    for name in ("init_device", "load_model"):
        patches.set(_WithProposer, name, starting(getattr(_WithProposer, name)))
    patches.set(CPUWorker, "compile_or_warm_up_model", compile_or_warm_up_model)
    init_device = CPUWorker.init_device
    patches.set(CPUWorker, "init_device", init_device_and_workspace)


def _profile(worker: Any) -> None:
    """A default start's, as the GPU's worker does it where no size of the KV cache is given; nothing may outlive it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu import cudagraph_utils

    caches, before, tear_down = list[Any](), len(tape.alive), cudagraph_utils._teardown_profiling_state

    def watched(runner: Any) -> None:
        caches.extend(map(ref, runner.kv_caches))
        tear_down(runner)

    with set_current_vllm_config(worker.vllm_config), Patches() as patches:
        patches.set(cudagraph_utils, "_teardown_profiling_state", watched)
        worker.model_runner.profile_run()
        worker.cudagraph_memory_estimate = worker.model_runner.profile_cudagraph_memory()
    has_caches, has_graphs = any(cache() is not None for cache in caches), len(tape.alive) > before
    if has_caches or has_graphs or not caches:
        raise DeviceError(f"after vLLM's profile, of {len(caches)} caches: {has_caches=}, {has_graphs=}")
