"""What stages of a cascade must have in common, and the K of a method and of its stages where nothing is said."""

from collections.abc import Collection
from dataclasses import replace

from vllm_specplugins.config.cascade import BuiltInConfig, CascadeConfig
from vllm_specplugins.config.checks import ConfigError, brief
from vllm_specplugins.config.parts import sample_methods
from vllm_specplugins.config.proposers import EarlyExitConfig
from vllm_specplugins.config.whole import SpecConfig

# K where nothing is said: what is copied costs nothing to draft, and is right all along or not at all.
LONG, SHORT = 31, 5


def with_default_length(config: SpecConfig, lookups: Collection[str]) -> SpecConfig:
    """K, and that of a cascade's stages, where the dictionary does not say it; the target may have it changed."""
    stages = config.stages
    first = stages[0].method if stages else config.method
    # Drawn drafts keep the logits of each place, K rows of the vocabulary for each request.
    if first not in lookups or "probabilistic" in sample_methods(config):
        return config.with_length(SHORT)
    if stages:
        own = tuple(
            stage
            if stage.num_speculative_tokens is not None or stage.method in (*lookups, "mtp")
            else replace(stage, num_speculative_tokens=SHORT)
            for stage in stages
        )
        config = replace(config, own=replace(config.own, stages=own))
    return config.with_length(LONG)


def check_stages(config: CascadeConfig, num_speculative_tokens: int) -> None:
    """Raises ConfigError for stages that do not fit each other, the policy or the cascade's K."""
    for index, stage in enumerate(config.stages):
        most = stage.num_speculative_tokens
        if most is not None and (type(most) is not int or not 1 <= most <= num_speculative_tokens):
            raise ConfigError(
                f"cascade: stages[{index}]: num_speculative_tokens must be an integer from 1 to "
                f"{num_speculative_tokens}, the cascade's, not {brief(most)}."
            )
    if config.policy == "verify":
        for index, stage in enumerate(config.stages[1:], start=1):
            if not isinstance(stage.own, EarlyExitConfig):
                raise ConfigError(
                    f"cascade: stages[{index}] must be early_exit where policy is 'verify', not {stage.method!r}."
                )
    if {"prompt_lookup", "suffix_lookup"} <= {stage.method for stage in config.stages}:
        raise ConfigError(
            "cascade: stages must not hold prompt_lookup beside suffix_lookup, which does what it does, and more."
        )
    built_in = [stage.method for stage in config.stages if isinstance(stage.own, BuiltInConfig)]
    if len(built_in) > 1:
        raise ConfigError(
            f"cascade: stages must not hold more than one proposer built into vLLM, like {' and '.join(built_in)}."
        )
    samples = any(getattr(stage.own, "draft_sample_method", None) == "probabilistic" for stage in config.stages)
    if built_in and samples:
        raise ConfigError(
            f"cascade: draft_sample_method must be 'greedy' or 'coupled' in all stages beside {built_in[0]}, not "
            f"'probabilistic'."
        )
