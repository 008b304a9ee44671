"""The rule of V2's budget, of V1's prices and of a drafter's length: the best rate of tokens per ms of a step."""

from typing import Any

import numpy as np

from vllm_specplugins.kernels.compiled import compiled


@compiled("Tuple((i8, f8))(f8[::1], f8[::1])")
def best_rate(tokens: Any, ms: Any) -> Any:
    """Returns the index of the best rate, the first of equal ones, and this rate.

    Args:
        tokens: [N], expected tokens of a step by its length.
        ms: [N], its time.

    >>> best_rate(np.array([1.0, 1.9, 2.0]), np.array([5.0, 5.0, 6.0]))
    (1, 0.38)
    """
    rates = tokens / ms
    best = rates.argmax()
    return best, rates[best]


@compiled("Tuple((i8, f8))(f8[::1], f8, f8, f8[::1])")
def best_number(scores: Any, tokens: float, plain_ms: float, more_ms: Any) -> Any:
    """Returns the number of draft tokens with the best rate, and this rate.

    Args:
        scores: [N], acceptance probabilities of draft tokens, the largest first.
        tokens: of a step without drafts.
        plain_ms: its time.
        more_ms: [N or more], by how many ms 1, 2, ... draft tokens lengthen it.

    >>> best_number(np.array([0.9, 0.2]), 1.0, 5.0, np.array([0.1, 1.5]))
    (1, 0.37254901960784315)
    >>> best_number(np.zeros(0), 1.0, 5.0, np.zeros(0))
    (0, 0.2)
    """
    all_tokens, ms = np.full(len(scores) + 1, tokens), np.full(len(scores) + 1, plain_ms)
    all_tokens[1:] += scores.cumsum()
    ms[1:] += more_ms[: len(scores)]
    return best_rate(all_tokens, ms)
