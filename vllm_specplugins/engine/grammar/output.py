"""How the scheduler tells a worker which tokens of its drafts a grammar forced."""

from typing import Any

from vllm_specplugins.counters import Forced

_FORCED = "specplugins_forced"  # attribute of SchedulerOutput
NEVER = [-1]  # what a worker tells as the draft of a request that can be verified at one position alone


def tell(scheduler_output: Any, forced: Forced) -> None:
    """By the scheduler."""
    setattr(scheduler_output, _FORCED, forced)


def forced_in(scheduler_output: Any) -> Forced:
    """By the worker."""
    forced: Forced = getattr(scheduler_output, _FORCED, {})
    return forced
