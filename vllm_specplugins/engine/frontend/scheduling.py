"""Adapts the plugin's methods to vLLM's scheduling: a name that permits asynchronous scheduling, a K that fits the
server, and time to shut down."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.config.lengths import shortened
from vllm_specplugins.config.whole import SHORT
from vllm_specplugins.engine.hooks import replaced, wrap
from vllm_specplugins.plan import CHOOSING, PLANNED

logger = logging.getLogger("vllm.specplugins")

GRACE_S = 5.0  # the time that vLLM gives workers
MASKS_SHARE = 0.01  # share of the device's memory above which bitmasks of structured output shorten the default K


@contextmanager
def may_be_asynchronous(method: str) -> Iterator[None]:
    """Adds the plugin's method to the names that vLLM's check of `async_scheduling` accepts."""
    from vllm.config import vllm as vllm_config_module

    known_names = Literal[(*get_args(vllm_config_module.NgramGPUTypes), name_in_vllm(method))]  # type: ignore[valid-type]
    with replaced(vllm_config_module, {"NgramGPUTypes": known_names}):
        yield


def fitting_server(config: SpecConfig, engine_args: Any, model_config: Any) -> SpecConfig:
    """Returns a copy with a smaller default of K if the server needs it. `engine_args` has the server's numbers of
    requests and tokens. Raises ConfigError if LoRA allows no K, or not the user's K."""
    num_seqs, num_tokens, length = engine_args.max_num_seqs, engine_args.max_num_batched_tokens, config.length
    limit = num_tokens // num_seqs - 1
    if engine_args.enable_lora and limit < (length if config.says_length else 1):
        least = num_seqs * (1 + (length if config.says_length else 1))
        raise ConfigError(
            f"{config.method}: max_num_batched_tokens must be at least {least} with enable_lora, max_num_seqs "
            f"{num_seqs} and {least // num_seqs - 1} draft tokens (num_speculative_tokens), not {num_tokens}."
        )
    if config.says_length:
        return config
    row_bytes = 4 * num_seqs * -(-model_config.get_vocab_size() // 32)  # of the bitmasks of one position
    device_bytes, size = _device_bytes(), (1 + length) * row_bytes / 2**30
    fits = int(MASKS_SHARE * device_bytes / (2 * row_bytes)) - 1
    reasons = {
        f"LoRA needs max_num_batched_tokens ({num_tokens}) >= max_num_seqs ({num_seqs}) x (K + 1)": (
            limit if engine_args.enable_lora else length
        ),
        f"for max_num_seqs {num_seqs}, bitmasks of structured output would take {size:.2f} GiB on the device and on "
        f"the host, more than {MASKS_SHARE:.0%} of the device's memory": (max(SHORT, fits) if device_bytes else length),
        f"max_model_len is {model_config.max_model_len}": max(1, model_config.max_model_len - 1),
    }
    reason = min(reasons, key=reasons.__getitem__)
    if (limit := reasons[reason]) >= length:
        return config
    logger.info(
        "%s: num_speculative_tokens defaults to %d instead of %d on this server: %s.",
        config.method,
        limit,
        length,
        reason,
    )
    return replace(shortened(config, limit), says_length=False)


def _device_bytes() -> int:
    from vllm.platforms import current_platform

    try:
        return int(current_platform.get_device_total_memory())
    except Exception:  # a host without the device, as with Ray, or a platform without this method
        return 0


def fitting(vllm_config: Any) -> SpecConfig | None:
    """Returns a copy with a smaller default of K if a step may not schedule 1 + K tokens; None if K fits. Without a
    table of lengths, vLLM pads a prompt that is cached up to one token to 1 + K tokens. It never schedules such a
    prompt if this exceeds a step's budget, and fails if it exceeds the threshold of long prompts. Raises ConfigError if
    no K fits, or not the user's K."""
    scheduler, speculative_config = vllm_config.scheduler_config, vllm_config.speculative_config
    config, has_table = speculative_config.plugin_config, speculative_config.plan.scheduler_chooses
    if has_table and scheduler.scheduler_cls in (PLANNED, CHOOSING):
        return None
    slots = speculative_config.max_num_new_slots_for_drafting
    limits = {
        "max_num_batched_tokens": scheduler.max_num_batched_tokens - slots,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
    }
    limit, name = min((limit, name) for name, limit in limits.items() if limit)
    if config.length < limit:
        return None
    if limit < 2 or config.says_length:
        num = config.length if config.says_length else 1
        raise ConfigError(
            f"{config.method}: {name} must allow {num + 1} tokens with num_speculative_tokens {num}, not {limit}: vLLM "
            "adds a token."
        )
    sentence = (
        "%s: num_speculative_tokens defaults to %d instead of %d on this server: %s is %d, and vLLM adds a token."
    )
    logger.info(sentence, config.method, limit - 1, config.length, name, limit)
    return shortened(config, limit - 1)


def give_time(config: SpecConfig) -> None:
    """Gives engines that save a file time to shut down. With `--shutdown-timeout` 0, the default, vLLM's servers kill
    them on a signal, except on ROCm."""
    from vllm.v1.engine import utils

    if any(getattr(part.method_config, "store_path", None) for part in config.parts):
        wrap(utils, "get_engine_process_shutdown_timeout", _with_time)


def _with_time(original: Any, request_timeout: Any, process_timeout: Any) -> Any:
    seconds = original(request_timeout, process_timeout)
    return GRACE_S if request_timeout == 0 and seconds == 0 else seconds


def vllm_methods() -> tuple[Any, ...]:
    from vllm.config.speculative import SpeculativeMethod

    return get_args(SpeculativeMethod)


def name_in_vllm(method: str) -> str:
    """Returns the name of the plugin's method for vLLM, with a prefix if vLLM has a method of the same name."""
    return f"specplugins_{method}" if method in vllm_methods() else method
