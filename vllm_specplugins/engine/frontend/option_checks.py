"""Checks of a request's options by the user's own proposers, in the process in which requests come in.

That is code of theirs, and a client's data: it runs in a thread of its own, and a check that does not come back costs
its own request a budget of time, and no other's tokens.
"""

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

MOST_LEFT_BEHIND = 8  # each takes its turns of the interpreter, maybe for ever


class OptionChecks:
    """Runs `check_options` of proposers.

    Args:
        checks: each raises where it refuses a request's options.
        budget_ms: longest for all of a request's.
    """

    def __init__(self, checks: Sequence[OptionCheck], budget_ms: float):
        self._checks = checks
        self._budget_ms = budget_ms
        self._left_behind: list[Future[str | None]] = []

    def concern(self, options: Mapping[str, Any]) -> bool:
        """Whether somebody has to be asked about these options."""
        return bool(self._checks) and not options.keys() <= SETTINGS

    @property
    def are_stuck(self) -> bool:
        """Whether too many earlier checks have not returned."""
        self._left_behind = [check for check in self._left_behind if not check.done()]
        return len(self._left_behind) >= MOST_LEFT_BEHIND

    async def refusal(self, options: Mapping[str, Any]) -> str | None:
        """Why the options are refused, or None."""
        check: Future[str | None] = Future()
        check.set_running_or_notify_cancel()
        work = lambda: check.set_result(self._refusal(options))  # noqa: E731
        threading.Thread(target=work, name="specplugins-check", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(check), self._budget_ms / 1000)
        except TimeoutError:
            self._left_behind.append(check)
        if len(self._left_behind) == MOST_LEFT_BEHIND:
            logger.warning(
                "%d calls of check_options have not returned; until one does, requests with options of the proposer's "
                "own get no drafts.",
                MOST_LEFT_BEHIND,
            )
        return f"its check_options did not return within {self._budget_ms:.0f} ms"

    def _refusal(self, options: Mapping[str, Any]) -> str | None:
        for check in self._checks:
            try:
                check(options)
            except BaseException as error:  # SystemExit included
                return error_text(error)
        return None
