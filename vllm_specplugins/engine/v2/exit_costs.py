"""Model Runner V2: what drafting costs, by how much of it is done.

vLLM times drafting as a whole, and counts that into every step when it chooses how many tokens to verify. Where an exit
drafts less, or nothing, a step is shorter, and a token more to verify a larger part of it.
"""

from typing import Any


class ExitCosts:
    """Of an AdaptiveVerificationManager, whose tables are replaced by what is expected of the next step."""

    def __init__(self) -> None:
        self._whole: Any = None  # as timed: ms of drafting by requests, and of verifying by tokens
        self._expected: Any = None

    def of(self, manager: Any, num_reqs: int) -> tuple[float, Any] | None:
        """ms of drafting the most tokens for so many requests, and ms [most tokens] of verifying; None: not timed."""
        if manager is None or manager.cost_tables is None:
            return None
        if manager.cost_tables is not self._expected:
            self._whole = manager.cost_tables
        return float(self._whole[0][num_reqs]), self._whole[1]

    def expect(self, manager: Any, share: float) -> None:
        """That so much of the drafting is done."""
        draft_ms, verify_ms = self._whole
        manager.cost_tables = self._expected = share * draft_ms, verify_ms
