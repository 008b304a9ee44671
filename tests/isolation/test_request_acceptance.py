"""Acceptance of single requests."""

import numpy as np

from vllm_specplugins.draft import Feedback
from vllm_specplugins.isolation.request_acceptance import Acceptance


def feedback(**accepted: int) -> Feedback:
    """Of drafts of 4 tokens."""
    counts = np.array(list(accepted.values()), np.int32)
    return Feedback(list(accepted), np.full(len(counts), 4, np.int32), counts)


def test_a_request_that_is_over_is_not_counted_anew() -> None:
    """Feedback may come a step late. Kills: an entry for a request that nobody will ever take."""
    acceptance = Acceptance()
    acceptance.add(feedback(a=1, b=4))
    assert acceptance.take(["a"]) == [0.25]
    acceptance.add(feedback(a=2, b=0))
    assert acceptance.take(["a", "b"]) == [0.5]
    acceptance.add(feedback(c=4))
    acceptance.add(feedback(a=4))  # another one, much later
    assert acceptance.take(["a", "c"]) == [1.0, 1.0]
    acceptance.add(feedback())
    assert acceptance._counts == {} and not acceptance._over
