"""Which targets a proposer of ours can run layers of, or read states of; refused before the engine loads anything."""

from dataclasses import replace

from vllm.config import ModelConfig, VllmConfig

from vllm_specplugins.config import (
    ConfigError,
    EarlyExitConfig,
    JumpConfig,
    MedusaConfig,
    SpecConfig,
    parts,
    with_exits,
)
from vllm_specplugins.engine.target.model_source import may_be_cut, uncuttable
from vllm_specplugins.proposers.exit_choice import default_layers


def has_state(model: ModelConfig) -> bool:
    """Whether a layer keeps a state that every token changes, as Mamba's, GDN's and short convolutions do."""
    return bool(model.is_hybrid or model.has_inner_state or model.is_attention_free)


def checked_for(vllm_config: VllmConfig, config: SpecConfig) -> SpecConfig:
    """The configuration with the layers that "auto" means for this target.

    Raises:
        ConfigError: a proposer of ours cannot run its layers.
    """
    model, parallel, method = vllm_config.model_config, vllm_config.parallel_config, config.method
    config = with_exits(config, lambda own: with_candidates(own, model.get_total_num_hidden_layers()))
    exits, jumps = parts(config, EarlyExitConfig), parts(config, JumpConfig)
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"{method}: {name} must be 1, not {size}.")
    if parallel.data_parallel_size > 1 and model.is_moe:  # engines of a dense model know nothing of each other
        raise ConfigError(
            f"{method}: data_parallel_size must be 1 for a mixture of experts, whose engines run each layer together, "
            f"not {parallel.data_parallel_size}."
        )
    if vllm_config.lora_config is not None and parts(config, MedusaConfig):
        raise ConfigError(f"{method}: enable_lora must be false, not True: the heads know the model without adapters.")
    kinds = {
        "a hybrid or state-space model": has_state(model),
        "a multimodal model": model.is_multimodal_model or model.uses_mrope,
        "an encoder-decoder model": model.is_encoder_decoder,
    }
    for kind, found in kinds.items():
        if found:
            raise ConfigError(f"{method}: model must be a text-only decoder with attention in every layer, not {kind}.")
    for heads in parts(config, MedusaConfig):
        from vllm_specplugins.proposers.medusa_heads import check_medusa

        check_medusa(
            heads.heads,
            num_heads=config.common.num_speculative_tokens,
            hidden_size=model.get_hidden_size(),
            vocab_size=model.get_vocab_size(),
        )
    if not exits and not jumps:
        return config
    registered = model.registry.models.get(model.architecture)
    module = getattr(registered, "module_name", "")  # of a class of the user's own there is none
    if not may_be_cut(module):
        raise uncuttable(method, model.architecture)
    for exit_config in exits:
        _check_exit(exit_config, model, config.common.num_speculative_tokens)
    for jump in jumps:
        from vllm_specplugins.proposers.jump_head import check_jump

        check_jump(jump.head, num_layers=model.get_total_num_hidden_layers(), hidden_size=model.get_hidden_size())
    return config


def with_candidates(config: EarlyExitConfig, num_layers: int) -> EarlyExitConfig:
    """An exit's configuration with the layers that "auto" stands for, of a target with so many."""
    if config.exit_layer != "auto":
        return config
    layers = set(default_layers(num_layers))
    if config.exit_head is not None:
        from vllm_specplugins.proposers.exit_head import read_head_config

        layers.add(read_head_config(config.exit_head).exit_layer)
    return replace(config, exit_layer=tuple(sorted(layers)) if len(layers) > 1 else layers.pop())


def _check_exit(config: EarlyExitConfig, model: ModelConfig, num_draft: int) -> None:
    num_layers = model.get_total_num_hidden_layers()
    if config.candidates[-1] > num_layers:
        raise ConfigError(
            f"early_exit: exit_layer must be an integer from 1 to {num_layers}, the layers of this model, "
            f"not {config.candidates[-1]}."
        )
    if config.exit_head is not None:
        from vllm_specplugins.proposers.exit_head import check_exit_head, read_head_config

        trained_for = read_head_config(config.exit_head).exit_layer
        check_exit_head(
            config.exit_head,
            exit_layer=trained_for if trained_for in config.candidates else config.candidates[0],
            hidden_size=model.get_hidden_size(),
            vocab_size=model.get_vocab_size(),
        )
    if config.look_ahead is not None:
        from vllm_specplugins.proposers.look_ahead import check_look_ahead

        check_look_ahead(
            config.look_ahead,
            exit_layer=config.candidates[0],
            hidden_size=model.get_hidden_size(),
            num_draft=num_draft,
        )
