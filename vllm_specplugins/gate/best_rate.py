"""The rule by which every length is chosen: the best rate of tokens per ms in this step."""

from typing import Any

import numpy as np

from vllm_specplugins.kernels.compiled import compiled

MARGIN = 1.05  # times its ms a draft token must gain: estimates err, and the best rate is one that errs upwards


@compiled("Tuple((i8, f8))(f8[::1], f8[::1])")
def best_rate(tokens: Any, ms: Any) -> Any:
    """Returns the index of the best rate, the first one of equal rates, and this rate.

    Args:
        tokens, ms: [N], expected tokens of a step by its number of draft tokens, or by other choices, and its time.

    >>> import numpy as np
    >>> best_rate(np.array([1.0, 1.9, 2.0]), np.array([5.0, 5.1, 6.0]))
    (1, 0.37254901960784315)
    """
    rates = tokens / ms
    best = rates.argmax()
    return best, rates[best]


@compiled("Tuple((i8, f8))(f8[::1], f8, f8, f8[::1])")
def best_number(scores: Any, tokens: float, plain_ms: float, more_ms: Any) -> Any:
    """Returns the number of draft tokens with the best rate, and this rate.

    Args:
        scores: [N], acceptance probabilities of draft tokens, the largest first.
        tokens, plain_ms: tokens and time of a step without drafts.
        more_ms: [N or more], ms by which 1, 2, ... draft tokens lengthen a step; they count MARGIN times.
    """
    all_tokens, ms = np.full(len(scores) + 1, tokens), np.full(len(scores) + 1, plain_ms)
    all_tokens[1:] += scores.cumsum()
    ms[1:] += MARGIN * more_ms[: len(scores)]
    return best_rate(all_tokens, ms)
