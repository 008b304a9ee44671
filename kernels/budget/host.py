"""The shared budget in loops that Numba compiles, for simulated budgets, with the choice of reference.py."""

from typing import Any

import numpy as np

from ..compiled import compiled


@compiled("i8[::1](f4[:, :], i8[::1], i8[::1], i8)")
def share_budget(
    accept_probs: Any,  # [S, K]
    slots: Any,  # [R]
    num_draft: Any,  # [R]
    budget: int,
) -> Any:
    """Returns the number of tokens of each draft that are verified, [R]."""
    scores, rows, count = np.empty(num_draft.sum(), np.float32), np.empty(num_draft.sum(), np.int64), 0
    for row in range(len(slots)):
        survival = np.float32(1.0)
        for step in range(num_draft[row]):
            survival *= accept_probs[slots[row], step]
            scores[count], rows[count] = -survival, row
            count += 1
    admitted = np.zeros(len(slots), np.int64)
    for place in np.argsort(scores, kind="mergesort")[:budget]:  # of equal scores the earlier row
        admitted[rows[place]] += 1
    return admitted
