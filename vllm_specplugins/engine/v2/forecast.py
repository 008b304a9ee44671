"""Model Runner V2: what a step's drafts will be worth, from what is known one step late.

vLLM chooses how many tokens to verify from the confidences of the drafts before. A model's are much alike from step to
step; those of a lookup are 0 until something is found, and then a budget of 0 would cost the first of its drafts.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

DECAY = 0.8  # of what is known of a request, by step behind one in which nothing was found

Floats = npt.NDArray[Any]


class Forecast:
    """Expects of a request, where nothing was found, what it had one step later before. Nothing, if it never had any.

    Args:
        num_slots: of requests.
        width: K, most tokens of a draft.
    """

    def __init__(self, num_slots: int, width: int):
        self._found = np.zeros((num_slots, width))  # mean chance of survival behind a step in which nothing was found
        self._had_nothing = np.zeros(num_slots, bool)  # in the step before

    def clear(self, slot: int) -> None:
        """A new request."""
        self._found[slot], self._had_nothing[slot] = 0.0, False

    def apply(self, confidences: Floats, slots: npt.NDArray[np.integer[Any]]) -> None:
        """Raises the confidences [num_slots, K] of one step, of these requests, to what is expected of the next.

        >>> forecast, one = Forecast(1, 2), np.array([0])
        >>> for found in ([[0.0, 0.0]], [[0.9, 0.5]], [[0.0, 0.0]]):
        ...     confidences = np.array(found)
        ...     forecast.apply(confidences, one)
        >>> confidences.round(4).tolist()
        [[0.18, 0.5]]
        """
        survival = confidences[slots].astype(np.float64).cumprod(axis=1)
        share = (1 - DECAY) * self._had_nothing[slots, None]
        self._found[slots] += share * (survival - self._found[slots])
        self._had_nothing[slots] = survival[:, 0] == 0
        survival = np.maximum(survival, self._found[slots])
        before = np.concatenate((np.ones((len(slots), 1)), survival[:, :-1]), axis=1)
        confidences[slots] = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
