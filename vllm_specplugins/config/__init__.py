"""The configuration: one frozen dataclass per method, checked field by field. An error is one sentence with the field,
the value and the allowed values. Nothing here imports vLLM.
"""

from vllm_specplugins.config.fields import (
    ConfigError,
    brief,
    check_fields,
    did_you_mean,
    error_text,
    integer,
    is_integer,
    one_line,
)
from vllm_specplugins.config.lookahead import LookaheadConfig
from vllm_specplugins.config.proposers import (
    MAX_STAGES,
    CascadeConfig,
    CustomConfig,
    EarlyExitConfig,
    GrammarConfig,
    JumpConfig,
    MedusaConfig,
    PromptLookupConfig,
    RemoteConfig,
    StageConfig,
    SuffixLookupConfig,
    redis_url,
)
from vllm_specplugins.config.whole import (
    MAX_NUM_SPECULATIVE_TOKENS,
    CommonConfig,
    SpecConfig,
    check_stages,
    methods_of,
    rule,
    sample_methods,
    stage_configs,
    stage_names,
)
