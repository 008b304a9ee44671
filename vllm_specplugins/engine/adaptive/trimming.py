"""Enables vLLM's adaptive verification, which trims drafts on the device. The device knows their actual lengths even
with asynchronous scheduling. It verifies a draft token if its acceptance probability (0 without a match) justifies its
cost. Without it the scheduler plans a draft's length from the last one (engine/scheduler.py)."""

import logging
from dataclasses import replace
from itertools import chain
from typing import Any

from vllm.v1.worker.gpu import model_runner

from vllm_specplugins.engine.adaptive.budget import Budget
from vllm_specplugins.engine.frontend.spec_config import CAN_TRIM
from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.gate.step_times import lengths_up_to

logger = logging.getLogger("vllm.specplugins")


def trimming_if_it_can(runner: Any, speculator: Any, initialize: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls vLLM's `initialize_kv_cache`, which knows the attention backends and creates the manager of adaptive
    verification. If a backend cannot trim drafts, the engine plans their lengths instead of stopping."""
    create = model_runner.maybe_create_adaptive_verification_manager

    def created(**arguments: Any) -> Any:
        try:
            manager = create(**arguments)
        except ValueError as error:
            manager, names = None, {group.backend.get_name() for groups in arguments["attn_groups"] for group in groups}
            logger.warning(
                "%s: no trimming on the device, because attention backend %s does not support it; the scheduler sets "
                "draft lengths one step ahead. Use %s to trim drafts (vLLM: %s...).",
                *(runner.speculative_config.plugin_config.method, " or ".join(sorted(names)), CAN_TRIM),
                " ".join(str(error).split())[:80],
            )
            for part in (speculator, runner.speculative_config, runner.rejection_sampler):
                part.enable_adaptive_verification = False
        if manager is None:
            _record_plain_steps(runner)
            return None
        record = manager.record_confidences  # the runner may pass the probabilities of a drafter of vLLM
        manager.record_confidences = lambda _, batch: record(speculator.draft_token_confidence_probs, batch)
        edits_any = getattr(getattr(runner.rejection_sampler, "editor", None), "edits_any", lambda slots: False)
        probs = speculator.outcomes.shared_probs
        speculator.session.budget = Budget(manager, probs, edits_any, runner.max_model_len)
        return manager

    with replaced(model_runner, {"maybe_create_adaptive_verification_manager": created}):
        result = initialize(*args, **kwargs)
    if any(group.backend.get_name() == "TRITON_ATTN" for groups in runner.attn_groups for group in groups):
        record_single_tokens(runner.cudagraph_manager)
    return result


def record_single_tokens(graphs: Any) -> None:
    """Makes a manager of graphs of any lengths up to K + 1 also record graphs of one token per request: TRITON_ATTN
    splits the keys of a long text only there, and steps without drafts use them."""
    for descs in chain(graphs._capture_descs.values(), graphs._candidates.values()):
        widths = [(1, desc.max_query_len) if (desc.max_query_len or 1) > 1 else (desc.max_query_len,) for desc in descs]
        descs[:] = [
            replace(desc, max_query_len=width) for desc, both in zip(descs, widths, strict=True) for width in both
        ]


def _record_plain_steps(runner: Any) -> None:
    """Makes vLLM also record graphs of one token per request, for steps that draft nothing. vLLM needs a table of at
    least two lengths by number of requests; the plugin's scheduler chooses the length."""
    config = runner.speculative_config
    if config.plan.scheduler_chooses and runner.max_num_reqs > 1:
        max_num_draft, chain = runner.num_speculative_steps, config.plugin_config.longest_chain
        chains = lengths_up_to(max_num_draft, chain)[1:-1] if chain else ()
        lengths = [(size, size, length) for size, length in enumerate((0, max_num_draft, *chains), 1)]
        config.num_speculative_tokens_per_batch_size = lengths
