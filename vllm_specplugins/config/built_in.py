"""The configuration of a drafter built into vLLM, as a stage of a cascade."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_specplugins.config.fields import ConfigError, brief, did_you_mean
from vllm_specplugins.config.proposers import StageConfig
from vllm_specplugins.config.whole import SpecConfig, sample_methods

# Keys of vLLM's speculative_config that a proposer built into vLLM may have as a stage; vLLM checks their values.
BUILT_IN_SETTINGS = (
    "attention_backend",
    "code_revision",
    "disable_lookahead_block_hashes",  # from vLLM 0.33 on, as draft_lm_head_quantization
    "draft_lm_head_quantization",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "draft_token_map",  # perhaps from vLLM 0.34 on, as the next three
    "draft_token_map_dynamic_rank",
    "draft_token_map_dynamic_rows",
    "draft_token_map_quantization",
    "dspark_draft_topk",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "parallel_drafting",
    "quantization",
    "revision",
    "use_local_argmax_reduction",
)

# Other keys, which would make a drafter look tokens up or choose draft lengths, as the cascade does -> the value that
# switches them off.
CASCADES = {"draft_confidence_threshold": 0.0, "prompt_lookup_max": None, "prompt_lookup_min": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInConfig:
    """`draft_model`, `eagle`, `eagle3`, `mtp`, `dflash`, `dspark`: a proposer built into vLLM, as a stage of a cascade.

    Args:
        model: the draft model; null for `mtp` layers in the target's checkpoint.
        settings: the other keys of vLLM's speculative_config, from BUILT_IN_SETTINGS.
    """

    model: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, index: int, method: str, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration of stages[index] from the user's dictionary (without its "method" key).

        Raises:
            ConfigError: unknown key, or no model.
        """
        for key in raw:
            if key in CASCADES:
                raise ConfigError(
                    f"cascade: stages[{index}]: remove {key}: the cascade does lookups and sets draft lengths."
                )
            if key != "model" and key not in BUILT_IN_SETTINGS:
                raise ConfigError(
                    f"cascade: stages[{index}]: {brief(key)} is not a field; the fields are model and vLLM's "
                    f"settings in docs/configuration.md{did_you_mean(key, ('model', *BUILT_IN_SETTINGS))}"
                )
        model = raw.get("model")
        if not (isinstance(model, str) and model) and (model is not None or method != "mtp"):
            raise ConfigError(
                f"cascade: stages[{index}]: model must be a non-empty string for {method}, not {brief(model)}."
            )
        return cls(model=model, settings={key: raw[key] for key in raw if key != "model"})


def built_in_stage(config: SpecConfig) -> StageConfig | None:
    """Returns the cascade's stage that is built into vLLM, or None."""
    return next((stage for stage in config.stages if isinstance(stage.method_config, BuiltInConfig)), None)


def check_built_in(config: SpecConfig) -> None:
    """Raises ConfigError for more than one such stage, or if vLLM's sampler cannot verify another stage's drafts."""
    names = [stage.method for stage in config.stages if isinstance(stage.method_config, BuiltInConfig)]
    if len(names) > 1:
        raise ConfigError(f"cascade: keep only one of {' and '.join(names)} in stages: vLLM runs one drafter.")
    if names and "probabilistic" in sample_methods(config):
        raise ConfigError(
            f"cascade: draft_sample_method must be 'greedy' or 'coupled' in all stages of a cascade with {names[0]}, "
            "not 'probabilistic'."
        )
