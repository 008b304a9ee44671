"""vLLM's adaptive verification trims drafts on the device, where their true lengths are known, under asynchronous
scheduling, too: it verifies draft tokens with an acceptance probability (0 without a match) that is worth their cost.
Without it the scheduler plans a draft's length from the last one (v2/scheduler.py)."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.worker.gpu import model_runner

from vllm_specplugins.engine.adaptive.budget import Budget
from vllm_specplugins.engine.frontend.spec_config import CAN_TRIM
from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.gate.step_times import lengths_up_to

logger = logging.getLogger("vllm.specplugins")


def trimming_if_it_can(runner: Any, speculator: Any, initialize: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls vLLM's `initialize_kv_cache`, which makes its manager of adaptive verification."""
    create = or_planned(model_runner.maybe_create_adaptive_verification_manager, runner, speculator)
    with replaced(model_runner, {"maybe_create_adaptive_verification_manager": create}):
        return initialize(*args, **kwargs)


def or_planned(create: Callable[..., Any], runner: Any, speculator: Any) -> Callable[..., Any]:
    """Wraps vLLM's factory of adaptive verification, called when the attention backends are known: if a backend cannot
    trim drafts, the engine plans their lengths instead of ending."""

    @wraps(create)
    def created(**arguments: Any) -> Any:
        try:
            if (manager := create(**arguments)) is not None:
                record = manager.record_confidences  # the runner may hand over those of a drafter of vLLM's
                manager.record_confidences = lambda _, batch: record(speculator.draft_token_confidence_probs, batch)
                edits_any = getattr(getattr(runner.rejection_sampler, "editor", None), "edits_any", lambda slots: False)
                budget = Budget(manager, speculator.outcomes.shared_probs, edits_any, runner.max_model_len)
                speculator.barrier.budget = budget
                return manager
        except ValueError as error:
            names = sorted({group.backend.get_name() for groups in arguments["attn_groups"] for group in groups})
            logger.warning(
                "%s: drafts are not trimmed on the device, but planned a step ahead: attention backend %s cannot, %s "
                "can (%s...).",
                *(runner.speculative_config.plugin_config.method, " or ".join(names), CAN_TRIM),
                " ".join(str(error).split())[:80],
            )
            speculator.enable_adaptive_verification = False
            runner.speculative_config.enable_adaptive_verification = False
            runner.rejection_sampler.enable_adaptive_verification = False
        _record_plain_steps(runner)
        return None

    return created


def _record_plain_steps(runner: Any) -> None:
    """Makes vLLM also record graphs of one token per request, for steps that draft nothing. vLLM reads lengths by
    number of requests, of which there must be two, or more where drafts branch; our scheduler chooses."""
    config = runner.speculative_config
    if config.plan.scheduler_chooses and runner.max_num_reqs > 1:
        max_num_draft, chain = runner.num_speculative_steps, config.plugin_config.longest_chain
        chains = lengths_up_to(max_num_draft, chain)[1:-1] if chain else ()
        lengths = [(size, size, length) for size, length in enumerate((0, max_num_draft, *chains), 1)]
        config.num_speculative_tokens_per_batch_size = lengths
