"""Model Runner V2: chooses the number of tokens that a drafter drafts in addition to a lookup, for all requests of a
step, before its drafts are known, from the expected gains of both. R: requests of a step."""

from collections.abc import Sequence

import numpy as np

from vllm_specplugins.gate.trials import EXPLORE_EVERY, GOOD_ACCEPTANCE, steps_between
from vllm_specplugins.structures.arrays import Floats

CONTINUED = 3  # mean accepted lookup tokens after a drafter's draft that is accepted as a whole
FADING = 0.95  # decay per step of the mean rate of tokens per ms
NEW_REPORT = (
    0.0,
    GOOD_ACCEPTANCE,
)  # of a request without drafts: a lookup's gain, and a drafter's acceptance rate


class DrafterLength:
    """Chooses for consecutive steps, and stores their rate of tokens per ms."""

    def __init__(self) -> None:
        self._tokens = self._ms = 0.0  # decayed means per step
        self._quiet = 0  # steps since the last draft longer than the shortest

    def choose(self, reports: Floats, lengths: Sequence[int], step_ms: float, saved_ms: float) -> int:
        """Returns the length with the largest difference between its expected tokens and the tokens that the engine
        emits in the time of its passes. The shortest length counts as no pass and no token. From time to time it tries
        the longest length, as EXPLORE_SHARE allows.

        Args:
            reports: [R, 2], the gain of a lookup's draft in tokens, and the acceptance rate of the drafter's tokens.
            lengths: the possible lengths; each adds a pass, or the last one adds all passes.
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
