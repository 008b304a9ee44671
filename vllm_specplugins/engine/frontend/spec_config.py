"""Defines the plugin's `SpeculativeConfig`, which carries its checked configuration into every process of the
engine."""

import logging
from contextlib import nullcontext
from typing import Any

from pydantic import SkipValidation
from vllm import envs
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config as vllm_dataclass
from vllm.platforms import current_platform

from vllm_specplugins.config import ConfigError, SpecConfig, StageConfig, sample_methods
from vllm_specplugins.config.built_in import built_in_stage
from vllm_specplugins.config.lengths import with_length_for_target
from vllm_specplugins.engine.built_in import reads_lengths_on_host, speculative_config_of
from vllm_specplugins.engine.frontend import scheduling
from vllm_specplugins.engine.frontend.entrances import check_arrivals
from vllm_specplugins.engine.frontend.kernel_overrides import look_into_plain_modules_alone
from vllm_specplugins.engine.frontend.options import check_requests
from vllm_specplugins.engine.frontend.scheduling import name_in_vllm
from vllm_specplugins.engine.frontend.streams import split_streams
from vllm_specplugins.engine.masks import fill_short_masks
from vllm_specplugins.engine.metrics.export import export_metrics
from vllm_specplugins.engine.switch import follow_calls
from vllm_specplugins.engine.target.admission import check_kind, check_states, check_target, has_state
from vllm_specplugins.engine.verify import check_verifier
from vllm_specplugins.methods import reads_history, runs_target
from vllm_specplugins.plan import Conditions, make_plan
from vllm_specplugins.proposers.heads.medusa_heads import num_heads

logger = logging.getLogger("vllm.specplugins")

CAN_TRIM = "FLASH_ATTN on Hopper, FLASHINFER on Blackwell and TRITON_ATTN"

# Every process that receives the plugin's configuration imports this module, including the front ends.
check_requests()
check_arrivals()
export_metrics()
fill_short_masks()
split_streams()
follow_calls()
look_into_plain_modules_alone()

# vLLM's workers that the plugin's workers extend (engine/worker.py).
WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_specplugins.engine.worker.GPUWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_specplugins.engine.worker.CPUWorker",
}


@vllm_dataclass
class PluginSpeculativeConfig(SpeculativeConfig):
    """A method of the plugin in vLLM's form: a speculative method without a model. A cascade with a proposer built into
    vLLM has the form of that proposer, so vLLM prepares memory, KV cache, lookahead slots and hidden states for it."""

    method: str | None = None
    plugin_config: SkipValidation[Any] = None
    plan: SkipValidation[Any] = None  # a plan.Plan, from `take_over` on

    def __post_init__(self) -> None:
        if self.built_in is not None:
            SpeculativeConfig.__post_init__(self)
            return
        self.model = self.method
        self.prompt_lookup_min = self.prompt_lookup_max = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    @property
    def built_in(self) -> StageConfig | None:
        return built_in_stage(self.plugin_config)

    @property
    def built_in_tokens(self) -> int:
        """Returns K of the built-in stage."""
        length = self.built_in and self.built_in.num_speculative_tokens
        return length or self.num_speculative_tokens

    @property
    def runs_target(self) -> bool:
        return runs_target(self.plugin_config)

    @property
    def draws(self) -> bool:
        """Returns whether drafts are sampled."""
        return bool(sample_methods(self.plugin_config) - {"greedy"})

    @property
    def reads_history(self) -> bool:
        return reads_history(self.plugin_config)

    def use_ngram(self) -> bool:
        """Returns whether vLLM's runner stores all tokens in the device's memory."""
        return self.plan.on_device and self.reads_history


class PluginVllmConfig(VllmConfig):
    """A VllmConfig that can be validated again in an engine's process, with lookahead slots for methods that run the
    target."""

    def __post_init__(self) -> None:
        config = self.speculative_config
        with scheduling.may_be_asynchronous(config.plugin_config.method) if config else nullcontext():
            super().__post_init__()

    @property
    def num_lookahead_tokens(self) -> int:
        config = self.speculative_config
        return self.num_speculative_tokens if config and config.runs_target else super().num_lookahead_tokens


def build(
    config: SpecConfig,
    engine_args: Any,
    usage_context: Any,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> PluginSpeculativeConfig:
    """Returns the plugin's configuration in vLLM's form. Raises ConfigError if vLLM refuses its built-in stage, or if K
    does not fit the server."""
    config = with_length_for_target(config, num_heads, has_state(target_model_config))
    # vLLM sets these defaults after this call, and then checks K; it does no harm to set them twice.
    engine_args._set_default_max_num_seqs_and_batched_tokens_args(
        usage_context, target_model_config, target_parallel_config
    )
    config = scheduling.fitting_server(config, engine_args, target_model_config)
    common = {
        "plugin_config": config,
        "target_model_config": target_model_config,
        "target_parallel_config": target_parallel_config,
    }
    if stage := built_in_stage(config):
        return speculative_config_of(PluginSpeculativeConfig, stage, config, common)
    return PluginSpeculativeConfig(
        method=name_in_vllm(config.method),
        num_speculative_tokens=config.length,
        draft_sample_method="probabilistic" if "probabilistic" in sample_methods(config) else "greedy",
        **common,
    )


def take_over(vllm_config: VllmConfig, async_scheduling: bool | None) -> None:
    """Sets the plugin's worker, plan and scheduler in a configuration that vLLM has completed. `async_scheduling` is
    the user's value. Raises ConfigError if the method cannot run in this engine."""
    speculative_config = vllm_config.speculative_config
    method = speculative_config.plugin_config.method
    if current_platform.is_cpu() and has_state(vllm_config.model_config):
        raise ConfigError(
            f"{method}: model must have attention in every layer on a CPU: vLLM cannot restore the states of hybrid "
            "and state-space models there after a rejection."
        )
    if current_platform.is_cpu() and envs.VLLM_BATCH_INVARIANT:
        raise ConfigError(f"{method}: VLLM_BATCH_INVARIANT must be 0 on a CPU, not 1: vLLM does not support it there.")
    check_verifier(speculative_config.plugin_config)
    check_states(vllm_config, method)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            f"{method}: pipeline_parallel_size must be 1 on Model Runner V1, not {stages}: vLLM needs a drafter in "
            "each stage there."
        )
    if speculative_config.runs_target:
        check_target(vllm_config, speculative_config.plugin_config)
    if speculative_config.built_in is None:  # otherwise vLLM reserves these slots itself, and knows the name
        vllm_config.__class__ = PluginVllmConfig
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise ConfigError(f"{method}: worker_cls must be one of {', '.join(WORKERS)} or not set, not {worker!r}.")
    vllm_config.parallel_config.worker_cls = WORKERS[worker]
    plan = make_plan(speculative_config.plugin_config, conditions_of(vllm_config, async_scheduling))
    if plan.branches:
        check_kind(vllm_config.model_config, method)
    speculative_config.plan, speculative_config.enable_adaptive_verification = plan, plan.trims
    vllm_config.scheduler_config.async_scheduling = plan.is_async
    if plan.scheduler is not None:
        vllm_config.scheduler_config.scheduler_cls = plan.scheduler
    logger.info("%s: %s", method, plan)


def conditions_of(vllm_config: VllmConfig, asked_async: bool | None) -> Conditions:
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
    """Returns why adaptive verification cannot trim drafts, if this is known before the engine starts."""
    parallel, model, config = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if reads_lengths_on_host(config):
        return "vLLM's drafter reads the longest draft length on the host"
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
