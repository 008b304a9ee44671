"""Adaptive verification: vLLM trims drafts on the device, where their true lengths are known, under asynchronous
scheduling, too. Who drafts there says how likely each token is (0 where nothing was found), and vLLM shares out what is
worth its cost. Where that cannot be, a draft's length is planned from the last one (v2/scheduler.py).
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_specplugins.engine.adaptive.budget import Budget
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.methods import method_of

logger = logging.getLogger("vllm.specplugins")

CAN = "FLASH_ATTN on Hopper, FLASHINFER on Blackwell and TRITON_ATTN"


def place(vllm_config: Any) -> None:
    """Leaves a cascade on the host where nothing would trim its exit's drafts: there it has a gate of its own; one with
    a drafter of vLLM's, and what drafts late, in a pipeline; and that where a synchronous scheduler waits anyway."""
    config, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if not (config.reads_history and (config.runs_target or config.built_in or config.drafts_late)):
        return
    is_here = parallel.world_size == parallel.tensor_parallel_size and vllm_config.use_v2_model_runner
    if config.drafts_late:
        is_here &= _may_be_late(vllm_config)
    if config.runs_target and not config.plugin_config.tree:
        is_here &= _missing(vllm_config) is None
    config.stays_on_host = not is_here


def _may_be_late(vllm_config: Any) -> bool:
    """Whether steps are scheduled ahead. Meanwhile a user's own class may draw from the process's random numbers, of
    which ranks must have the same."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    is_ours = method_of(vllm_config.speculative_config.plugin_config.parts[0].method).is_late
    is_ahead: bool = scheduler.async_scheduling and scheduler.scheduler_cls is None
    return is_ahead and (is_ours or parallel.world_size == 1)


def settle(vllm_config: Any) -> str | None:
    """Switches it on in a finished configuration of a method that drafts on the device, or returns why not."""
    config = vllm_config.speculative_config
    if not (config.drafts_on_device and vllm_config.use_v2_model_runner):
        return "the step that drafts knows their lengths"
    if config.plugin_config.tree:
        return "a tree is verified as a whole"
    why_not = 'gate is "off"' if config.plugin_config.common.gate == "off" else _missing(vllm_config)
    config.enable_adaptive_verification = why_not is None
    return why_not


def plan_in_words(vllm_config: Any, schedule: str, untrimmed_for: str | None) -> str:
    """One line for the log of a start: where drafts are made, when, who chooses their lengths, and what trims them.

    Args:
        schedule: a step's, with its reason.
        untrimmed_for: why drafts are not trimmed; None: they are.
    """
    config, place, who = vllm_config.speculative_config, "in each step, which waits for them", "a gate beside it"
    if vllm_config.use_v2_model_runner and not config.reads_on_host:
        has_graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        has_graphs &= not (config.runs_target and vllm_config.lora_config is not None)
        place = f"on the device, {'in CUDA graphs' if has_graphs else 'eagerly'}"
        place += ", and late on the host, for which no step waits" if config.drafts_late else ""
        who = "the scheduler" if chooses_length(vllm_config) else "nothing"
    if config.plugin_config.common.gate == "off":
        who = "nothing"
    trims = f"are not trimmed on the device: {untrimmed_for}" if untrimmed_for else "are trimmed on the device"
    return f"drafts {place}; steps are scheduled {schedule}; {who} chooses how many tokens; drafts {trims}."


def _missing(vllm_config: Any) -> str | None:
    """What adaptive verification lacks; None if nothing does as far as is known before the engine starts."""
    parallel, model, config = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if config.method == "draft_model" or (config.built_in is not None and config.use_multi_module_mtp()):
        return "vLLM's drafter takes its longest query from the lengths that the host knows"
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "it needs full CUDA graphs"
    for name, is_set in (
        ("LoRA", vllm_config.lora_config is not None),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("batch-sharded sampling", parallel.enable_batch_sharded_sampling),
        ("return_sampling_mask", model.return_sampling_mask),
        ("auxiliary outputs", vllm_config.aux_output_config.enabled),
    ):
        if is_set:
            return f"vLLM does not combine it with {name}"
    backend = vllm_config.attention_config.backend
    if backend is not None and not backend.get_class().supports_device_cpu_query_lens_mismatch():
        return f"attention backend {backend.name} cannot, {CAN} can"
    return None


def or_planned(create: Callable[..., Any], runner: Any, speculator: Any) -> Callable[..., Any]:
    """vLLM's factory of what carries it out, called when the attention backends are known; a backend that cannot costs
    the true lengths, and not the engine."""

    @wraps(create)
    def created(**arguments: Any) -> Any:
        try:
            if (manager := create(**arguments)) is not None:
                record = manager.record_confidences  # the runner may hand over those of a drafter of vLLM's
                manager.record_confidences = lambda _, batch: record(speculator.draft_token_confidence_probs, batch)
                edits_any = getattr(getattr(runner.rejection_sampler, "editor", None), "edits_any", lambda slots: False)
                own = speculator.outcomes.confidences, speculator.budget_implementation, edits_any, runner.max_model_len
                speculator.barrier.budget = Budget(manager, *own)
                return manager
        except ValueError as error:
            names = sorted({group.backend.get_name() for groups in arguments["attn_groups"] for group in groups})
            logger.warning(
                "%s: drafts are not trimmed on the device, but planned a step ahead: attention backend %s cannot, %s "
                "can (%s...).",
                *(runner.speculative_config.plugin_config.method, " or ".join(names), CAN),
                " ".join(str(error).split())[:80],
            )
            speculator.enable_adaptive_verification = False
            runner.speculative_config.enable_adaptive_verification = False
            runner.rejection_sampler.enable_adaptive_verification = False
        _record_plain_steps(runner)
        return None

    return created


def chooses_length(vllm_config: Any) -> bool:
    """Whether the scheduler does. vLLM with several engines of a mixture of experts must draft as much in each, or they
    wait for one another."""
    parallel = vllm_config.parallel_config
    alone: bool = parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
    return alone and vllm_config.speculative_config.chooses_length


def _record_plain_steps(runner: Any) -> None:
    """Has vLLM record decoding of one token a request beside that of K + 1, for steps that draft nothing. Its schedule,
    which ours replaces, says lengths by number of requests, of which there must be two, or more for a tree's chains."""
    if chooses_length(runner.vllm_config) and runner.max_num_reqs > 1:
        most, chain = runner.num_speculative_steps, runner.speculative_config.plugin_config.longest_chain
        chains = lengths_up_to(most, chain)[1:-1] if chain else ()  # beside a tree
        lengths = [(size, size, length) for size, length in enumerate((0, most, *chains), 1)]
        runner.speculative_config.num_speculative_tokens_per_batch_size = lengths
