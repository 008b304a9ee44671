"""Our `SpeculativeConfig`: carries a checked configuration of ours into every process of the engine."""

import logging
from typing import Any

from pydantic import SkipValidation
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config as vllm_dataclass

from vllm_specplugins.config import ConfigError, EarlyExitConfig, SpecConfig
from vllm_specplugins.engine.verify import allow_parameters
from vllm_specplugins.methods import early_exits, reads_history, runs_target

logger = logging.getLogger("vllm.specplugins")

# vLLM's workers that ours extend; see engine/worker.py.
WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_specplugins.engine.worker.GPUWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_specplugins.engine.worker.CPUWorker",
}
SCHEDULER = "vllm_specplugins.engine.scheduler.PlannedScheduler"


@vllm_dataclass
class PluginSpeculativeConfig(SpeculativeConfig):
    """What vLLM sees of a method of ours: a speculative method that has no model of its own."""

    method: str | None = None
    plugin_config: SkipValidation[Any] = None

    def __post_init__(self) -> None:
        self.model = self.method
        self.prompt_lookup_min = self.prompt_lookup_max = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    @property
    def runs_target(self) -> bool:
        """Whether the method runs layers of the target, and so writes to its KV cache."""
        return runs_target(self.plugin_config)

    @property
    def reads_history(self) -> bool:
        """Whether the method needs the tokens on the host."""
        return reads_history(self.plugin_config)


class PluginVllmConfig(VllmConfig):
    """vLLM's configuration with lookahead slots for a method that writes keys and values past the last token."""

    @property
    def num_lookahead_tokens(self) -> int:
        return self.num_speculative_tokens


def build(
    config: SpecConfig, target_model_config: ModelConfig, target_parallel_config: ParallelConfig
) -> PluginSpeculativeConfig:
    """vLLM's view of a configuration of ours."""
    samples = [part.draft_sample_method for part in early_exits(config)]
    return PluginSpeculativeConfig(
        method=config.method,
        num_speculative_tokens=config.common.num_speculative_tokens,
        plugin_config=config,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
        draft_sample_method="probabilistic" if "probabilistic" in samples else "greedy",
    )


def take_over(vllm_config: VllmConfig) -> None:
    """Puts our worker, and our scheduler where it is needed, into a finished configuration.

    Raises:
        ConfigError: the configuration holds something that our methods cannot run with.
    """
    speculative_config = vllm_config.speculative_config
    method = speculative_config.method
    if speculative_config.runs_target:
        _check_target(vllm_config, speculative_config.plugin_config)
        vllm_config.__class__ = PluginVllmConfig
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise ConfigError(f"{method}: worker_cls must be one of {', '.join(WORKERS)} (or left alone), not {worker!r}.")
    vllm_config.parallel_config.worker_cls = WORKERS[worker]
    allow_parameters()
    if not vllm_config.scheduler_config.async_scheduling:
        return
    if not vllm_config.use_v2_model_runner:
        raise ConfigError(f"{method}: async_scheduling must be false on Model Runner V1, not True.")
    if vllm_config.scheduler_config.scheduler_cls is not None:
        raise ConfigError(
            f"{method}: scheduler_cls must be left alone with async_scheduling, "
            f"not {vllm_config.scheduler_config.scheduler_cls!r}."
        )
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER


def _check_target(vllm_config: VllmConfig, config: SpecConfig) -> None:
    """Raises ConfigError for a target whose layers a proposer of ours cannot run."""
    model, parallel, method = vllm_config.model_config, vllm_config.parallel_config, config.method
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"{method}: {name} must be 1, not {size}.")
    if parallel.tensor_parallel_size > 1 and getattr(config.own, "gate", "off") != "off":
        raise ConfigError(f"{method}: gate must be 'off' with tensor parallelism: it would differ between the ranks.")
    if vllm_config.lora_config is not None:
        raise ConfigError(f"{method}: enable_lora must be false, not True: drafts would run another request's adapter.")
    kinds = {
        "a hybrid or state-space model": model.is_hybrid or model.has_inner_state or model.is_attention_free,
        "a multimodal model": model.is_multimodal_model or model.uses_mrope,
        "an encoder-decoder model": model.is_encoder_decoder,
    }
    for kind, found in kinds.items():
        if found:
            raise ConfigError(f"{method}: model must be a text-only decoder with attention in every layer, not {kind}.")
    for exit_config in early_exits(config):
        _check_exit(exit_config, model)


def _check_exit(config: EarlyExitConfig, model: ModelConfig) -> None:
    num_layers = model.get_total_num_hidden_layers()
    if config.exit_layer > num_layers:
        raise ConfigError(
            f"early_exit: exit_layer must be an integer from 1 to {num_layers}, the layers of this model, "
            f"not {config.exit_layer}."
        )
    if config.exit_head is not None:
        from vllm_specplugins.proposers.exit_head import check_exit_head

        check_exit_head(
            config.exit_head,
            exit_layer=config.exit_layer,
            hidden_size=model.get_hidden_size(),
            vocab_size=model.get_vocab_size(),
        )
