"""The configuration: one frozen dataclass per method, checked field by field.

Knows nothing of vLLM. Everything that it refuses, it refuses with one sentence that names the field, the value
and what is allowed.
"""

from vllm_specplugins.config.cascade import BUILT_IN_SETTINGS, MAX_STAGES, BuiltInConfig, CascadeConfig, StageConfig
from vllm_specplugins.config.checks import (
    ConfigError,
    brief,
    check_fields,
    check_value,
    did_you_mean,
    error_text,
    integer,
)
from vllm_specplugins.config.parts import (
    built_in_stage,
    methods_of,
    rule,
    sample_methods,
    stage_configs,
    stage_names,
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
)
from vllm_specplugins.config.stages import SHORT, check_stages, with_default_length
from vllm_specplugins.config.whole import MAX_NUM_SPECULATIVE_TOKENS, CommonConfig, SpecConfig

__all__ = [
    "BUILT_IN_SETTINGS",
    "MAX_NUM_SPECULATIVE_TOKENS",
    "MAX_STAGES",
    "SHORT",
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
    "brief",
    "built_in_stage",
    "check_fields",
    "check_stages",
    "check_value",
    "did_you_mean",
    "error_text",
    "integer",
    "methods_of",
    "rule",
    "sample_methods",
    "stage_configs",
    "stage_names",
    "with_default_length",
    "with_stage",
]
