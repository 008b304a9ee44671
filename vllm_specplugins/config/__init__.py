"""The configuration: one frozen dataclass per method, checked field by field.

Knows nothing of vLLM. Everything that it refuses, it refuses with one sentence that names the field, the value
and what is allowed.
"""

from vllm_specplugins.config.cascade import BUILT_IN_SETTINGS, MAX_STAGES, BuiltInConfig, CascadeConfig, StageConfig
from vllm_specplugins.config.checks import ConfigError, check_fields, check_value, integer, meant, said, shown
from vllm_specplugins.config.parts import (
    built_in_stage,
    layers_to_hand_out,
    methods_of,
    parts,
    rule,
    sample_methods,
    stage_names,
    with_exits,
    with_stage,
)
from vllm_specplugins.config.proposers import (
    CustomConfig,
    EarlyExitConfig,
    JumpConfig,
    MedusaConfig,
    PromptLookupConfig,
    RegisteredConfig,
    SuffixLookupConfig,
    TokenRecyclingConfig,
)
from vllm_specplugins.config.whole import MAX_NUM_SPECULATIVE_TOKENS, CommonConfig, SpecConfig

__all__ = [
    "BUILT_IN_SETTINGS",
    "MAX_NUM_SPECULATIVE_TOKENS",
    "MAX_STAGES",
    "BuiltInConfig",
    "CascadeConfig",
    "CommonConfig",
    "ConfigError",
    "CustomConfig",
    "EarlyExitConfig",
    "JumpConfig",
    "MedusaConfig",
    "PromptLookupConfig",
    "RegisteredConfig",
    "SpecConfig",
    "StageConfig",
    "SuffixLookupConfig",
    "TokenRecyclingConfig",
    "built_in_stage",
    "check_fields",
    "check_value",
    "integer",
    "layers_to_hand_out",
    "meant",
    "methods_of",
    "parts",
    "rule",
    "said",
    "sample_methods",
    "shown",
    "stage_names",
    "with_exits",
    "with_stage",
]
