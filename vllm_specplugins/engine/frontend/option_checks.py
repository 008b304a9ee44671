"""Checks of a request's options by custom proposers, where requests arrive. A check is a user's code on a client's
data: it runs in a thread, and one that hangs costs its request a budget of time, and other requests no tokens."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_specplugins.config import error_text
from vllm_specplugins.custom import OptionCheck
from vllm_specplugins.request_options import SETTINGS

logger = logging.getLogger("vllm.specplugins")

MAX_ABANDONED = 8  # checks that have not returned; each still takes turns of the interpreter


class OptionChecks:
    """Runs `check_options` of proposers, which raise to refuse options, for at most `budget_ms` ms a request."""

    def __init__(self, checks: Sequence[OptionCheck], budget_ms: float):
        self._checks = checks
        self._budget_ms = budget_ms
        self._abandoned: list[Future[str | None]] = []

    def concern(self, options: Mapping[str, Any]) -> bool:
        """Whether any check has to see these options."""
        return bool(self._checks) and not options.keys() <= SETTINGS

    @property
    def are_stuck(self) -> bool:
        """Whether MAX_ABANDONED earlier checks have not returned yet."""
        self._abandoned = [check for check in self._abandoned if not check.done()]
        return len(self._abandoned) >= MAX_ABANDONED

    async def refusal(self, options: Mapping[str, Any]) -> str | None:
        """The reason why a check refuses the options, or None."""
        check: Future[str | None] = Future()
        check.set_running_or_notify_cancel()
        work = lambda: check.set_result(self._refusal(options))  # noqa: E731
        threading.Thread(target=work, name="specplugins-check", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(check), self._budget_ms / 1000)
        except TimeoutError:
            self._abandoned.append(check)
        if len(self._abandoned) == MAX_ABANDONED:
            logger.warning(
                "%d calls of check_options have not returned; until one does, requests with options of a custom "
                "proposer get no drafts.",
                MAX_ABANDONED,
            )
        return f"its check_options did not return within {self._budget_ms:.0f} ms"

    def _refusal(self, options: Mapping[str, Any]) -> str | None:
        for check in self._checks:
            try:
                check(options)
            except BaseException as error:  # SystemExit included
                return error_text(error)
        return None
