"""Passes the forced tokens of drafts from the scheduler to the workers."""

from typing import Any

from vllm_specplugins.counters import Forced

_FORCED = "specplugins_forced"  # attribute of SchedulerOutput
NEVER = [-1]  # a worker's draft for a request that can verify one position only


def attach_forced(scheduler_output: Any, forced: Forced) -> None:
    setattr(scheduler_output, _FORCED, forced)


def forced_in(scheduler_output: Any) -> Forced:
    forced: Forced = getattr(scheduler_output, _FORCED, {})
    return forced
