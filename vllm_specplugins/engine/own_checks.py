"""What the user's own proposers say to a request's options, in the process in which requests come in.

That is code of theirs, and a client's data: it runs in a thread of its own, and a check that does not come back costs
its own request a budget of time, and no other's tokens.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm_specplugins.config import said

MOST_LEFT_BEHIND = 8  # each takes its turns of the interpreter, maybe for ever


class OwnChecks:
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

    def begin(self, options: Mapping[str, Any]) -> "Future[str | None]":
        """Why the options are refused, or None; it is running, or done at once."""
        found: Future[str | None] = Future()
        found.set_running_or_notify_cancel()
        self._left_behind = [check for check in self._left_behind if not check.done()]
        if not self._checks:
            found.set_result(None)
        elif len(self._left_behind) >= MOST_LEFT_BEHIND:
            found.set_result(f"{MOST_LEFT_BEHIND} earlier checks of its check_options have not returned yet")
        else:
            work = lambda: found.set_result(self._refusal(options))  # noqa: E731
            threading.Thread(target=work, name="specplugins-check", daemon=True).start()
        return found

    def leave_behind(self, check: "Future[str | None]") -> str:
        """Why options are refused whose check was not done within the budget."""
        self._left_behind.append(check)
        return f"its check_options did not return within {self._budget_ms:.0f} ms"

    def _refusal(self, options: Mapping[str, Any]) -> str | None:
        for check in self._checks:
            try:
                check(options)
            except BaseException as error:  # SystemExit included
                return said(error)
        return None
