"""Checks the requirements of draft trees before an engine loads anything, and selects their attention backend."""

from copy import copy
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_specplugins.config import ConfigError, SpecConfig, methods_of
from vllm_specplugins.engine.verify import verifies

MAX_CONTEXT = 4096  # longer contexts double the time of a step, since one program reads all keys
_NAME, _BASE = "CUSTOM", "TRITON_ATTN"  # vLLM's name for v2/trees/attention.py, and for its base


def register() -> None:
    register_backend(AttentionBackendEnum[_NAME], "vllm_specplugins.engine.v2.trees.attention.TreeAttentionBackend")


def backend(config: SpecConfig, engine_args: Any) -> dict[str, Any]:
    """Returns the EngineArgs fields that select the attention backend of trees. Raises ConfigError if the user sets
    another backend."""
    if not config.longest_chain:
        return {}
    asked = [engine_args.attention_backend, getattr(engine_args.attention_config, "backend", None)]
    names = [getattr(backend, "name", backend) for backend in asked if backend is not None]
    if others := sorted({str(name) for name in names} - {_NAME, _BASE}):
        raise ConfigError(
            f"{config.method}: attention_backend must be {_BASE} or left out with {_word(config)}, not {others[0]!r}."
        )
    register()
    attention_config = copy(engine_args.attention_config)  # the caller may use it for other engines
    if asked[1] is not None:
        attention_config.backend = None
    return {"attention_backend": AttentionBackendEnum[_NAME], "attention_config": attention_config}


def _word(config: SpecConfig) -> str:
    return "lookahead" if "lookahead" in methods_of(config) else "tree"


def check_trees(vllm_config: VllmConfig) -> None:
    """Raises ConfigError for an engine in which a tree cannot be verified."""
    if not vllm_config.speculative_config.plugin_config.longest_chain:
        return
    if not verifies():
        raise ConfigError("VLLM_SPECPLUGINS_VERIFICATION must be plugin with trees, not vllm.")
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config, text = vllm_config.speculative_config.plugin_config, model.hf_text_config
    method, word = config.method, _word(config)
    if not vllm_config.use_v2_model_runner:
        raise ConfigError(f"{method}: remove {word}: Model Runner V1 has no attention for trees.")
    if model.max_model_len > MAX_CONTEXT:
        raise ConfigError(
            f"{method}: max_model_len must be at most {MAX_CONTEXT} with {word}, not {model.max_model_len}: "
            "attention for trees does not split long texts."
        )
    kinds = {
        "multi-head latent attention": model.use_mla,
        "a sliding window": model.rswa_window is not None
        or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)),
        "a quantised KV cache": vllm_config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
        "LoRA": vllm_config.lora_config is not None,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "auxiliary outputs": vllm_config.aux_output_config.enabled,  # vLLM would take those of the first nodes
        "return_sampling_mask": model.return_sampling_mask,
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,  # a node's keys are summed in another order than a chain's
        "watermarks": vllm_config.watermark_config is not None,
        "several ranks or engines": parallel.world_size * parallel.data_parallel_size > 1,
    }
    for kind, is_present in kinds.items():
        if is_present:
            raise ConfigError(f"{method}: remove {word}: it is not exact, or untested, with {kind}.")
