"""The time of a step by its number of tokens, as the engine measures it at its start, in steps without a context."""

from collections.abc import Mapping

import numpy as np

from vllm_specplugins.gate.usual import never_less
from vllm_specplugins.structures.arrays import Floats

GUESSED_SHARE = 0.02  # of a step that a token takes, where nothing was measured


class StepProfile:
    """Interpolates measured times, and never rates more tokens as cheaper; after the last one the last slope goes on.

    Args:
        ms: by number of tokens.

    >>> profile = StepProfile({1: 20.0, 2: 19.0, 4: 22.0})
    >>> [profile.ms(number) for number in (1, 2, 3, 4, 6)]
    [19.5, 19.5, 20.75, 22.0, 24.5]
    """

    def __init__(self, ms: Mapping[int, float]):
        measured = np.array(sorted(ms.items()), float)
        tokens, rising = measured[:, 0], never_less(measured[:, 1].copy(), np.ones(len(measured)))
        self._ms = np.interp(np.arange(tokens[-1] + 1), tokens, rising)  # of 0 tokens as of the fewest
        self._last = (rising[-1] - rising[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0

    def ms(self, num_tokens: float) -> float:
        beyond = max(0.0, num_tokens - (len(self._ms) - 1))
        place = num_tokens - beyond
        low = int(place)
        between = (place - low) * (self._ms[min(low + 1, len(self._ms) - 1)] - self._ms[low])
        return float(self._ms[low] + between + beyond * self._last)

    def after(self, num_tokens: int, number: int) -> Floats:
        """Returns [number + 1], by how much 0, 1, ... more tokens than `num_tokens` lengthen a step."""
        tokens = np.arange(num_tokens, num_tokens + number + 1)
        last = len(self._ms) - 1
        ms = self._ms[np.minimum(tokens, last)] + np.maximum(0, tokens - last) * self._last
        added: Floats = ms - ms[0]
        return added


def guess(num_reqs: int, ms: float) -> StepProfile:
    """Returns the profile of an engine without one, from a step of these requests."""
    return StepProfile({1: ms, 1 + num_reqs: ms * (1 + GUESSED_SHARE * num_reqs)})
