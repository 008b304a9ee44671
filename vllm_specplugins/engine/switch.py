"""Switches drafting of a running engine: `collective_rpc("specplugins_gate", ("none",))` ends drafting on every rank
from the next step on, and ("auto",) resumes it. vLLM's engine passes the call to its workers, and the plugin passes
their answers to the scheduler, which tells the workers in each step. The engine makes the same call at its start, and a
worker that cannot draft answers "none". While drafting is off, a step runs vLLM's code, and the plugin counts requests
alone."""

import logging
from collections import defaultdict
from functools import cache
from typing import Any

from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.messages import StepNews, news_of

logger = logging.getLogger("vllm.specplugins")
GATE = "specplugins_gate"  # the worker's method
NONE, AUTO = "none", "auto"
_NO_DRAFTS = defaultdict[int, int](int)


def follow_calls() -> None:
    """Makes vLLM's engine forward the switch to the scheduler. Applied once per process."""
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "__init__", _asked_at_start)
    wrap(EngineCore, "collective_rpc", _with_scheduler)


def _asked_at_start(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, vllm_config, *args, **kwargs)
    if getattr(vllm_config.speculative_config, "plugin_config", None) is not None:
        self.collective_rpc(GATE, args=(AUTO,))


def _with_scheduler(original: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    results = original(self, method, *args, **kwargs)
    if method == GATE:
        is_off = NONE in results
        if hasattr(self.scheduler, "switch"):
            self.scheduler.switch(is_off)
        elif is_off:
            raise ValueError("remove scheduler_cls to switch drafting off: only the plugin's schedulers support this.")
    return results


def checked_mode(mode: Any, data_parallel_size: int) -> str:
    """Returns a valid mode. Raises ValueError for an invalid one."""
    if mode not in (NONE, AUTO):
        raise ValueError(f"mode must be {NONE!r} or {AUTO!r}, not {mode!r}.")
    if mode == NONE and data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size must be 1 to switch drafting off, not {data_parallel_size}: all engines must draft "
            "alike."
        )
    return str(mode)


class Switched:
    """A mixin for vLLM's schedulers, with the switch."""

    requests: dict[str, Any]
    dynamic_sd_lookup: Any  # vLLM's table of draft lengths, by the number of requests
    is_off = False
    _own_class: Any = None  # while `aside` has replaced it
    _newest_on: StepNews | None = None  # of the newest step with drafting on; None: its outcome is there
    _other_lookup: Any = _NO_DRAFTS  # the table that is not in use

    def switch(self, is_off: bool) -> None:
        """Stops planning drafts from the next step on, or plans them again as configured."""
        if is_off is self.is_off:
            return
        self.is_off = is_off
        if self._own_class is not None:
            self.__class__, self._own_class = self._own_class, None
        self._other_lookup, self.dynamic_sd_lookup = self.dynamic_sd_lookup, self._other_lookup
        self._forget_drafts()
        logger.warning("specplugins_gate switched drafting %s.", "off" if is_off else "on")

    def _forget_drafts(self) -> None:
        for request in self.requests.values():
            request.spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        if self.is_off:
            self._forget_drafts()

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        news = news_of(scheduler_output)
        news.is_off = self.is_off
        if not self.is_off:
            self._newest_on = news

    def is_over(self, news: StepNews) -> None:
        """Leaves the next steps to vLLM's methods if drafting is off, and no step that drafted is under way. Called
        with each outcome."""
        if news is self._newest_on:
            self._newest_on = None
        # The first condition fails if the outcome came by a method that was bound before.
        if self._own_class is None and self.is_off and news.is_off and self._newest_on is None:
            self._own_class = type(self)
            self.__class__ = aside(self._own_class)


@cache
def aside(kind: Any) -> Any:
    """A kind of scheduler of ours with vLLM's methods for each step, and our counts. No request has a draft, and none
    arrives."""
    theirs: Any = next(base for base in kind.__mro__ if base.__module__.startswith("vllm."))

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = theirs.update_from_output(self, scheduler_output, model_runner_output)
        self.count(outputs)
        self.correct_report(model_runner_output)
        return outputs

    def after_schedule(self: Any, scheduler_output: Any) -> None:
        theirs._update_after_schedule(self, scheduler_output)
        news = news_of(scheduler_output)
        news.is_off = True
        self.send_totals(news)

    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None: ...

    methods = {"update_from_output": update_from_output, "_update_after_schedule": after_schedule}
    methods |= {name: getattr(theirs, name) for name in ("schedule", "update_draft_token_ids_in_output")}
    methods["update_draft_token_ids"] = update_draft_token_ids
    return type(kind.__name__, (kind,), methods)
