"""Which methods of ours are scheduled asynchronously, as vLLM's own are, and which scheduler that takes.

A method that reads tokens on the host waits for them in every step, and there a synchronous scheduler knows the true
lengths of its drafts. One that reads none leaves the device busy while the next step is scheduled. A pipeline is always
scheduled asynchronously: vLLM's synchronous scheduler would plan the drafts of a request whose last step is still on
its way through the stages.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

from vllm_specplugins.config import ConfigError, SpecConfig, methods_of
from vllm_specplugins.engine.adaptive.conditions import chooses_length
from vllm_specplugins.engine.frontend.method_names import name_in_vllm
from vllm_specplugins.engine.hooks import replaced, wrap
from vllm_specplugins.methods import drafts_on_device, reads_history

logger = logging.getLogger("vllm.specplugins")

SCHEDULER = "vllm_specplugins.engine.v2.scheduler.PlannedScheduler"
GRAMMAR = "vllm_specplugins.engine.grammar.scheduler.GrammarScheduler"
GRACE_S = 5.0  # as much time as vLLM gives workers
SYNCHRONOUS = "vllm_specplugins.engine.v2.scheduler.ChoosingScheduler"


def wanted_of_vllm(config: SpecConfig, asked: bool | None, num_stages: int) -> bool | None:
    """What vLLM is told: what the user asked for, else False or vLLM's own default (None)."""
    waits = reads_history(config) and not drafts_on_device(config) and num_stages == 1
    return False if asked is None and waits else asked


@contextmanager
def may_be_asynchronous(method: str) -> Iterator[None]:
    """vLLM's check of `async_scheduling` knows methods by name; ours is one more name while it runs."""
    from vllm.config import vllm as vllm_config_module

    known_names = Literal[(*get_args(vllm_config_module.NgramGPUTypes), name_in_vllm(method))]  # type: ignore[valid-type]
    with replaced(vllm_config_module, {"NgramGPUTypes": known_names}):
        yield


def settle(vllm_config: Any, asked: bool | None) -> str:
    """Puts our scheduler, where it is needed, into a finished configuration; returns in words what was chosen, and why.

    Raises:
        ConfigError: the user asks for what our methods cannot run with.
    """
    scheduler, method = vllm_config.scheduler_config, vllm_config.speculative_config.plugin_config.method
    if asked is None:
        synchronous_for = _synchronous_for(vllm_config)
        scheduler.async_scheduling = synchronous_for is None
        words = f"synchronously, for {synchronous_for}" if synchronous_for else "asynchronously"
    else:
        words = f"{'a' if asked else ''}synchronously, as async_scheduling says"
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    forces = "grammar" in methods_of(vllm_config.speculative_config.plugin_config)
    if forces and (scheduler.async_scheduling or scheduler.scheduler_cls is not None):
        raise ConfigError(
            f"{method}: async_scheduling and scheduler_cls must be left alone with grammar, whose text depends on all "
            f"tokens before it, not {scheduler.async_scheduling} and {scheduler.scheduler_cls!r}."
        )
    if not scheduler.async_scheduling:
        if num_stages > 1:
            raise ConfigError(
                f"{method}: pipeline_parallel_size must be 1 without async_scheduling, where vLLM plans drafts for a "
                f"request whose last step is still under way, not {num_stages}."
            )
        if forces:
            scheduler.scheduler_cls = GRAMMAR
        elif scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SYNCHRONOUS
        return words
    if not vllm_config.use_v2_model_runner:
        raise ConfigError(f"{method}: async_scheduling must be false on Model Runner V1, not True.")
    if scheduler.scheduler_cls is not None:
        raise ConfigError(
            f"{method}: scheduler_cls must be left alone with async_scheduling, not {scheduler.scheduler_cls!r}."
        )
    scheduler.scheduler_cls = SCHEDULER
    return words


def _synchronous_for(vllm_config: Any) -> str | None:
    """Why scheduling has to wait for the drafts; None if it need not."""
    config = vllm_config.speculative_config
    if config.reads_on_host and vllm_config.parallel_config.pipeline_parallel_size == 1:
        return "it reads tokens on the host (--async-scheduling plans each draft's length from the last one)"
    if not vllm_config.use_v2_model_runner:
        return "Model Runner V1 plans with the drafts at hand"
    if vllm_config.scheduler_config.scheduler_cls is not None:
        return "scheduler_cls is set"
    if not vllm_config.scheduler_config.async_scheduling:
        return "vLLM does so with this configuration"
    return None


def fitting(vllm_config: Any) -> SpecConfig | None:
    """The method with a shorter K, where a step may not schedule 1 + K tokens; None: K fits.

    Without a table of lengths vLLM pads a prompt that is cached but for a token to 1 + K tokens. If that is more than
    the budget of a step, it never schedules the prompt; if it is more than the threshold of long prompts, it dies.

    Raises:
        ConfigError: no K fits, or no tree.
    """
    scheduler, config = vllm_config.scheduler_config, vllm_config.speculative_config.plugin_config
    has_table = vllm_config.use_v2_model_runner and chooses_length(vllm_config)
    if has_table and scheduler.scheduler_cls in (SCHEDULER, SYNCHRONOUS):
        return None
    slots = vllm_config.speculative_config.max_num_new_slots_for_drafting
    limits = {
        "max_num_batched_tokens": scheduler.max_num_batched_tokens - slots,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
    }
    limit, name = min((limit, name) for name, limit in limits.items() if limit)
    if config.length < limit:
        return None
    if limit < 2 or config.tree:
        raise ConfigError(f"{config.method}: {name} must be at least {1 + (config.tree or 1)} with it, not {limit}.")
    tell = logger.warning if config.says_length else logger.info
    sentence = "%s: num_speculative_tokens is %d, not %d: vLLM pads prompts to one token more, and %s allows %d tokens."
    tell(sentence, config.method, limit - 1, config.length, name, limit)
    config, most = replace(config.with_length(limit - 1), says_length=True), limit - 1
    lengths = [min(stage.num_speculative_tokens or most, most) for stage in config.stages]
    stages = [replace(own, num_speculative_tokens=num) for own, num in zip(config.stages, lengths, strict=True)]
    return config.with_stages(stages) if stages else config


def give_time(config: SpecConfig) -> None:
    """Has engines of this front end that save a file end in their own time: at a signal vLLM's servers kill them at
    once, but on ROCm, where `--shutdown-timeout` is 0, its default."""
    from vllm.v1.engine import utils

    if any(getattr(part.method_config, "store_path", None) for part in config.parts):
        wrap(utils, "get_engine_process_shutdown_timeout", _with_time)


def _with_time(original: Any, request_timeout: Any, process_timeout: Any) -> Any:
    seconds = original(request_timeout, process_timeout)
    return GRACE_S if request_timeout == 0 and seconds == 0 else seconds
