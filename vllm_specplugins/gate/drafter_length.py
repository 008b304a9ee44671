"""Model Runner V2: chooses the number of tokens that a drafter drafts beside a lookup, for all requests of a step at
once and before its drafts are known, from the tokens that each is expected to gain. R: requests of a step."""

from collections.abc import Sequence

import numpy as np

from vllm_specplugins.gate.trials import EXPLORE_EVERY, GOOD_ACCEPTANCE, steps_between
from vllm_specplugins.structures.arrays import Floats

CONTINUED = 3  # accepted tokens of a lookup after a drafter's draft that is accepted as a whole
FADING = 0.95  # per step, of the mean rate of tokens per ms
NEW_REPORT = 0.0, GOOD_ACCEPTANCE  # of a request without drafts: what a lookup gains, and a drafter's acceptance rate


class DrafterLength:
    """Chooses for steps one after the other, and remembers their rate of tokens per ms."""

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0  # of a step, faded means
        self._quiet = 0  # steps since the last draft that is longer than the shortest

    def choose(self, reports: Floats, lengths: Sequence[int], step_ms: float, saved_ms: float) -> int:
        """Returns the length with the largest difference between the expected tokens and those that the engine emits in
        the time of the passes after the shortest length, whose tokens count as none. It also tries the longest one
        after many steps without, as EXPLORE_SHARE allows.

        Args:
            reports: [R, 2], the tokens that a lookup's draft gains, and the acceptance rate of the drafter's tokens.
            lengths: those to choose from; each adds a pass, or the last one adds all.
            step_ms: time of a step with the shortest length; the longest one takes `saved_ms` more.
        """
        gains, powers = reports[:, 0], reports[:, 1, None] ** np.arange(1, lengths[-1] + 1)
        beside = np.maximum(gains[:, None], powers.cumsum(axis=1) + CONTINUED * powers).sum(axis=0)
        tokens = np.array([gains.sum(), *(beside[length - 1] for length in lengths[1:])])
        more_ms = saved_ms * np.linspace(0, 1, len(lengths))
        best, self._quiet = int((tokens - self._tokens / max(self._ms, 1e-9) * more_ms).argmax()), self._quiet + 1
        if self._quiet > max(EXPLORE_EVERY, steps_between(saved_ms, step_ms)):
            best = len(lengths) - 1
        self._quiet = 0 if best else self._quiet
        self._tokens += (1 - FADING) * (len(reports) + tokens[best] - self._tokens)
        self._ms += (1 - FADING) * (step_ms + more_ms[best] - self._ms)
        return lengths[best]
