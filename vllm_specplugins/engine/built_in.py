"""Makes vLLM's configuration of a vLLM drafter that is a stage of a cascade."""

import copy
import logging
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from vllm.config import VllmConfig

from vllm_specplugins.config import ConfigError, SpecConfig, StageConfig
from vllm_specplugins.config.built_in import CASCADES

logger = logging.getLogger("vllm.specplugins")

T = TypeVar("T")


def speculative_config_of(kind: Callable[..., T], stage: StageConfig, config: SpecConfig, common: dict[str, Any]) -> T:
    """Creates an object of this subclass of vLLM's SpeculativeConfig as vLLM would for the stage. Raises
    ConfigError."""
    is_models_length = stage.method == "mtp" and not (stage.num_speculative_tokens or config.says_length)
    if not is_models_length:
        common["num_speculative_tokens"] = stage.num_speculative_tokens or config.length
    try:
        result: Any = kind(
            method=stage.method, model=stage.method_config.model, **stage.method_config.settings, **common
        )
    except Exception as error:  # vLLM, pydantic and transformers may raise anything
        raise ConfigError(f"cascade: vLLM refuses {stage.method}: {_first_sentence(error)}") from error
    if result.method != stage.method:
        raise ConfigError(
            f"cascade: method must be {result.method!r} for {stage.method_config.model}, not {stage.method!r}."
        )
    if is_models_length:
        short = replace(stage, num_speculative_tokens=min(config.length, result.num_speculative_tokens))
        result.plugin_config = config.with_stages([short if each is stage else each for each in config.stages])
    result.num_speculative_tokens = config.length
    for name, off in CASCADES.items():
        if getattr(result, name, None):  # 0 also means off
            logger.warning(
                "cascade: vLLM's %s is switched off for %s, because the cascade does lookups and sets draft lengths.",
                *(name, stage.method),
            )
            setattr(result, name, off)
    return result


def refuse_second_owner(theirs: Any) -> None:
    """Raises ConfigError if the drafter of a later vLLM performs lookups or trims drafts itself."""
    kind = type(theirs).__name__
    if "Ngram" in kind or "Suffix" in kind or hasattr(theirs, "num_valid_drafts_for_trim"):
        raise ConfigError(f"cascade: vLLM's {kind} cannot be a stage, because it does lookups or trims drafts itself.")


def for_built_in(vllm_config: VllmConfig) -> VllmConfig:
    """Returns a copy for the built-in stage, with the stage's K."""
    alone = copy.copy(vllm_config)
    alone.speculative_config = copy.copy(vllm_config.speculative_config)
    alone.speculative_config.num_speculative_tokens = vllm_config.speculative_config.built_in_tokens
    return alone


def without_built_in(vllm_config: VllmConfig) -> VllmConfig:
    """Returns a copy for the plugin's drafts, without that stage."""
    alone = copy.copy(vllm_config)
    alone.speculative_config = copy.copy(vllm_config.speculative_config)
    alone.speculative_config.draft_model_config = vllm_config.speculative_config.target_model_config
    alone.speculative_config.draft_parallel_config = vllm_config.speculative_config.target_parallel_config
    return alone


def _first_sentence(error: Exception) -> str:
    text, field = str(error) or type(error).__name__, ""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text, field = first["msg"].removeprefix("Value error, "), "".join(f"{part}: " for part in first["loc"][:1])
    sentence = " ".join(text.split()).split(". ")[0].removesuffix(".")
    return textwrap.shorten(field + sentence, 200, placeholder=" ...") + "."


def reads_lengths_on_host(speculative_config: Any) -> bool:
    """Returns whether vLLM's drafter computes its longest query from lengths on the host."""
    config = speculative_config
    return config.method == "draft_model" or (config.built_in is not None and config.use_multi_module_mtp())
