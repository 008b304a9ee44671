"""Chooses the number of tokens that a drafter drafts in addition to a lookup, for all requests of a step, before its
drafts are known, from the expected gains of both. R: requests of a step, L: lengths."""

from collections.abc import Hashable, Sequence

import numpy as np

from vllm_specplugins.gate.best_rate import best_rate
from vllm_specplugins.gate.trials import GOOD_ACCEPTANCE, Trials
from vllm_specplugins.structures.arrays import Floats

CONTINUED = 3  # mean accepted lookup tokens after a drafter's draft that is accepted as a whole
NEW_REPORT = 0.0, GOOD_ACCEPTANCE  # of a request without drafts: a lookup's gain, and a drafter's acceptance rate


def paying_length(tokens: Floats, step_ms: float, more_ms: float, trials: Trials, kind: Hashable) -> int:
    """Returns the index of the length with the best rate of tokens per ms. After many steps with the shortest length,
    it tries the longest one (Trials).

    Args:
        tokens: [L], expected tokens of a step by length; each length adds a pass, or the last one adds all passes.
        step_ms: time of a step with the shortest length; the longest one takes `more_ms` more.
    """
    best, _ = best_rate(tokens, step_ms + more_ms * np.linspace(0, 1, len(tokens)))
    if best:
        trials.restart(kind)
    elif trials.due(kind, more_ms, step_ms):
        best = len(tokens) - 1
    return int(best)


def expected_gains(reports: Floats, lengths: Sequence[int]) -> Floats:
    """Returns the tokens that all requests gain on Model Runner V2, [L]. The shortest length counts as no token.

    Args:
        reports: [R, 2], the gain of a lookup's draft in tokens, and the acceptance rate of the drafter's tokens.
    """
    gains, powers = reports[:, 0], reports[:, 1, None] ** np.arange(1, lengths[-1] + 1)
    beside = np.maximum(gains[:, None], powers.cumsum(axis=1) + CONTINUED * powers).sum(axis=0)
    return np.array([gains.sum(), *(beside[length - 1] for length in lengths[1:])])
