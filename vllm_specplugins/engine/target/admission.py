"""Refuses targets that a method does not support, before the engine loads anything."""

from vllm.config import ModelConfig, VllmConfig

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.custom import import_object
from vllm_specplugins.engine.target.model_source import kinds_of_state, may_be_cut, may_skip, uncuttable, unskippable
from vllm_specplugins.methods import drafters
from vllm_specplugins.proposers.learning.admission import check_learning
from vllm_specplugins.target import TargetSizes


def has_state(model: ModelConfig) -> bool:
    """Returns whether a layer has a state that every token changes, as in Mamba, GDN and short convolutions."""
    return bool(model.is_hybrid or model.has_inner_state or model.is_attention_free)


def check_kind(model: ModelConfig, method: str) -> None:
    """Raises ConfigError unless the model is a text-only decoder with attention in every layer."""
    kinds = {
        "a hybrid or state-space model": has_state(model),
        "a multimodal model": model.is_multimodal_model or model.uses_mrope,
        "an encoder-decoder model": model.is_encoder_decoder,
    }
    for kind, applies in kinds.items():
        if applies:
            raise ConfigError(f"{method}: model must be a text-only decoder with attention in every layer, not {kind}.")


def check_states(vllm_config: VllmConfig, method: str) -> None:
    """Raises ConfigError for Mamba 1 and, on V2, for linear attention: vLLM does not restore their states."""
    stays = {"mamba1", "linear_attention"} if vllm_config.use_v2_model_runner else {"mamba1"}
    model = vllm_config.model_config
    if has_state(model) and (kinds := sorted(stays & kinds_of_state(_module_of(model)))):
        raise ConfigError(
            f"{method}: model must have no states of kind {kinds[0]}, but {model.architecture} has them: vLLM cannot "
            "restore them after a rejection."
        )


def _module_of(model: ModelConfig) -> str:
    return str(getattr(model.registry.models.get(model.architecture), "module_name", ""))


def _check_skipping(vllm_config: VllmConfig, method: str) -> None:
    """Raises ConfigError for a target whose layers need the previous layers."""
    model, counts_experts = vllm_config.model_config, vllm_config.compilation_config.fast_moe_cold_start
    if counts_experts and model.is_moe:
        raise ConfigError(
            f"{method}: fast_moe_cold_start must be false with layers, not true: every layer with experts must run."
        )
    config = model.hf_text_config  # in DeepSeek's sparse attention, a layer uses the keys that another layer chose
    shares_keys = getattr(config, "index_topk_freq", 1) != 1 or getattr(config, "index_topk_pattern", None)
    if shares_keys or not may_skip(_module_of(model)):
        raise unskippable(method, model.architecture)


def check_target(vllm_config: VllmConfig, config: SpecConfig) -> None:
    """Raises ConfigError if the plugin's proposers cannot run the target's layers."""
    model, parallel, method = vllm_config.model_config, vllm_config.parallel_config, config.method
    rows = drafters(config)
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"{method}: {name} must be 1, not {size}.")
    if parallel.data_parallel_size > 1 and model.is_moe:  # engines of a dense model are independent
        raise ConfigError(
            f"{method}: data_parallel_size must be 1 for a mixture of experts, not {parallel.data_parallel_size}: its "
            "engines run each layer together."
        )
    if vllm_config.lora_config is not None and not all(row.knows_adapters for row, _ in rows):
        raise ConfigError(f"{method}: enable_lora must be false, not True: its head was trained without adapters.")
    check_kind(model, method)
    if any(row.cuts_layers for row, _ in rows) and not may_be_cut(_module_of(model)):
        raise uncuttable(method, model.architecture)
    if any(getattr(method_config, "layers", None) for _, method_config in rows):
        _check_skipping(vllm_config, method)
    sizes = model.get_total_num_hidden_layers(), model.get_hidden_size(), model.get_vocab_size()
    for (row, method_config), part in zip(rows, config.parts, strict=True):
        if row.check is not None:
            num_draft = getattr(part, "num_speculative_tokens", None) or config.longest_path
            import_object(row.check)(method_config, TargetSizes(*sizes, num_draft))
    check_learning(config, sizes[0], parallel.tensor_parallel_size, vllm_config.lora_config is not None)
