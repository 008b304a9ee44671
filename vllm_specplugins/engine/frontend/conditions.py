"""The facts about an engine from which plan.py decides, read from vLLM's finished configuration."""

from typing import Any

from vllm_specplugins.plan import Conditions

CAN_TRIM = "FLASH_ATTN on Hopper, FLASHINFER on Blackwell and TRITON_ATTN"


def conditions_of(vllm_config: Any, asked_async: bool | None) -> Conditions:
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    return Conditions(
        use_v2_model_runner=vllm_config.use_v2_model_runner,
        asked_async=asked_async,
        async_scheduling=scheduler.async_scheduling,
        scheduler_cls=scheduler.scheduler_cls,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        world_size=parallel.world_size,
        has_full_cudagraphs=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
        has_lora=vllm_config.lora_config is not None,
        untrimmed_for=_untrimmed_for(vllm_config) if vllm_config.use_v2_model_runner else None,
    )


def _untrimmed_for(vllm_config: Any) -> str | None:
    """Why adaptive verification cannot trim drafts, as far as is known before the engine starts."""
    parallel, model, config = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if config.method == "draft_model" or (config.built_in is not None and config.use_multi_module_mtp()):
        return "vLLM's drafter takes its longest query from the lengths that the host knows"
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "it needs full CUDA graphs"
    for name, is_set in (
        ("LoRA", vllm_config.lora_config is not None),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("batch-sharded sampling", parallel.enable_batch_sharded_sampling),
        ("return_sampling_mask", model.return_sampling_mask),
        ("auxiliary outputs", vllm_config.aux_output_config.enabled),
    ):
        if is_set:
            return f"vLLM does not combine it with {name}"
    backend = vllm_config.attention_config.backend
    if backend is not None and not backend.get_class().supports_device_cpu_query_lens_mismatch():
        return f"attention backend {backend.name} cannot, {CAN_TRIM} can"
    return None
