"""Checks of a request's options by the user's own proposers, in the process in which requests come in.

That is code of theirs, and a client's data: it runs in a thread of its own, and a check that does not come back costs
its own request a budget of time, and no other's tokens.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_specplugins.config import error_text
from vllm_specplugins.request_options import SETTINGS

logger = logging.getLogger("vllm.specplugins")

MOST_LEFT_BEHIND = 8  # each takes its turns of the interpreter, maybe for ever


class OptionChecks:
    """Runs `check_options` of proposers.

    Args:
        checks: each raises where it refuses a request's options.
        budget_ms: longest for all of a request's.
    """

    def __init__(self, checks: Sequence[Callable[[Mapping[str, Any]], None]], budget_ms: float):
        self._checks = checks
        self._budget_ms = budget_ms
        self._left_behind: list[Future[str | None]] = []

    @property
    def budget_s(self) -> float:
        """How long to wait for what `begin` returns."""
        return self._budget_ms / 1000

    def begin(self, options: Mapping[str, Any]) -> "Future[str | None] | None":
        """Why the options are refused, or None; it is running, or done at once. None: nobody can be asked now, because
        too many earlier checks have not returned."""
        found: Future[str | None] = Future()
        found.set_running_or_notify_cancel()
        self._left_behind = [check for check in self._left_behind if not check.done()]
        if not self._checks or options.keys() <= {*SETTINGS}:
            found.set_result(None)
        elif len(self._left_behind) >= MOST_LEFT_BEHIND:
            return None
        else:
            work = lambda: found.set_result(self._refusal(options))  # noqa: E731
            threading.Thread(target=work, name="specplugins-check", daemon=True).start()
        return found

    def leave_behind(self, check: "Future[str | None]") -> str:
        """Why options are refused whose check was not done within the budget."""
        self._left_behind.append(check)
        if len(self._left_behind) == MOST_LEFT_BEHIND:
            logger.warning(
                "%d calls of check_options have not returned; until one does, requests with options of the proposer's "
                "own get none of its drafts.",
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
