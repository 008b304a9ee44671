"""How the scheduler tells a worker which tokens of its drafts a grammar forced."""

from collections.abc import Mapping, Sequence
from typing import Any

_FORCED = "specplugins_forced"  # attribute of SchedulerOutput
NEVER = [-1]  # what a worker tells as the draft of a request that can be verified at one position alone

Forced = Mapping[str, tuple[int, Sequence[int]]]  # by request, how many tokens of its draft come before, and the tokens


def tell(scheduler_output: Any, forced: Forced) -> None:
    """By the scheduler."""
    setattr(scheduler_output, _FORCED, forced)


def forced_in(scheduler_output: Any) -> Forced:
    """By the worker."""
    forced: Forced = getattr(scheduler_output, _FORCED, {})
    return forced
