"""Limits trials of drafts that a rule does not expect to pay off. Trials show whether text has changed."""

from collections import Counter
from collections.abc import Hashable

EXPLORE_EVERY = 12  # fewest steps between two trials of a stage that does not pay off
EXPLORE_SHARE = 0.01  # largest share of the time for one kind of trial
GOOD_ACCEPTANCE = 0.75  # acceptance probability for text that suits a stage, independent of the record of other text


class Trials:
    """Counts the steps since the last trial of each kind."""

    def __init__(self, share: float = EXPLORE_SHARE) -> None:
        self._share = share
        self._quiet = Counter[Hashable]()

    def due(self, kind: Hashable, trial_ms: float, step_ms: float, at_least: int = EXPLORE_EVERY) -> int:
        """Counts a step without drafts of this kind. Returns the number of such steps if it is time for a trial, which
        takes `trial_ms` beside the time of a step, else 0."""
        quiet = self._quiet[kind] = self._quiet[kind] + 1
        if quiet < max(at_least, trial_ms / step_ms / self._share):
            return 0
        self._quiet[kind] = 0
        return quiet

    def add(self, kind: Hashable, num_steps: int) -> None:
        """Counts steps in which there could be no trial."""
        self._quiet[kind] += num_steps

    def restart(self, kind: Hashable) -> None:
        """Counts from 0, since there are drafts of this kind without a trial."""
        self._quiet[kind] = 0
