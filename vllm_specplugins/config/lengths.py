"""Sets K, the largest number of draft tokens of a request in one step, for a method and its stages. The defaults may
depend on the target, and a step limits K."""

from collections.abc import Callable, Collection
from dataclasses import replace

from vllm_specplugins.config.proposers import MedusaConfig
from vllm_specplugins.config.whole import SHORT, SpecConfig, sample_methods

LONG = 31  # default of K for copies, which cost nothing and are mostly accepted as a whole or not at all


def with_default_length(config: SpecConfig, lookups: Collection[str]) -> SpecConfig:
    """Returns a copy with the default K of the method and of its stages; the target may change it."""
    # Sampled drafts store the logits of each position: K rows of the vocabulary for each request.
    if config.parts[0].method not in lookups or "probabilistic" in sample_methods(config):
        return config.with_length(SHORT)
    long, stages = (*lookups, "mtp", "medusa"), list(config.stages)
    for index, stage in enumerate(stages):
        if stage.num_speculative_tokens is None and stage.method not in long:
            stages[index] = replace(stage, num_speculative_tokens=SHORT)
    return (config.with_stages(stages) if stages else config).with_length(LONG)


def with_length_for_target(config: SpecConfig, num_heads: Callable[[str], int], has_state: bool) -> SpecConfig:
    """Returns a copy with the default K that the target allows: a small one if the target stores a state per token.
    `num_heads`, the number of Medusa heads in a folder, is K unless the user sets it."""
    kind, stages = MedusaConfig, list(config.stages)
    if isinstance(config.method_config, kind) and not config.says_length:
        config = config.with_length(num_heads(config.method_config.heads))
    elif has_state and not config.says_length:
        config = config.with_length(min(config.length, SHORT))
    for index, stage in enumerate(stages):
        if isinstance(stage.method_config, kind) and stage.num_speculative_tokens is None:
            stages[index] = replace(stage, num_speculative_tokens=num_heads(stage.method_config.heads))
    return config.with_stages(stages) if stages else config


def shortened(config: SpecConfig, length: int) -> SpecConfig:
    """Returns a copy with this K, which also limits the K of each stage that has one."""
    lengths = [stage.num_speculative_tokens and min(stage.num_speculative_tokens, length) for stage in config.stages]
    stages = [replace(stage, num_speculative_tokens=num) for stage, num in zip(config.stages, lengths, strict=True)]
    config = replace(config.with_length(length), says_length=True)
    return config.with_stages(stages) if stages else config
