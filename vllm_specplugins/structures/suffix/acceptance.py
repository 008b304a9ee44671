"""Acceptance probability of a token of a suffix draft, learned by source, length of the match and share of the places.

Dimension: C cells.
"""

import numpy as np
import numpy.typing as npt

from vllm_specplugins.kernels.compiled import inlined
from vllm_specplugins.structures.suffix.ring import Int32Array

Float64Array = npt.NDArray[np.float64]

MEMORY = 1024.0  # how many tokens of a cell are remembered
FIRST_WEIGHT = 8.0  # tokens that a first guess counts as
FIRST_ACCEPT_PROBS = (0.3, 0.5, 0.6, 0.75, 0.85, 0.92, 0.96)  # by grade of the match, where all places agree
FIRST_SHARES = (0.9, 0.35, 0.65, 0.85, 1.0)  # of that, by share of the places


def first_accept_probs() -> Float64Array:
    """[2, C] float64: tokens tried and accepted of each cell, before there was any."""
    accepted = np.tile(np.outer(FIRST_ACCEPT_PROBS, FIRST_SHARES).ravel(), 2)
    return FIRST_WEIGHT * np.stack([np.ones_like(accepted), accepted])


@inlined
def cell_of(is_stored: bool, length: int, votes: int, num_places: int) -> int:
    """Of a token after a match of this length, or one that grew to it, of earlier texts or the request's own. Share 0:
    one place, 4: several that all agree."""
    grade = (length > 1) + (length > 2) + (length > 3) + (length > 5) + (length > 8) + (length > 16)
    share = 0
    if num_places > 1:
        share = 1 + (2 * votes > num_places) + (4 * votes > 3 * num_places) + (votes == num_places)
    return (is_stored * len(FIRST_ACCEPT_PROBS) + grade) * len(FIRST_SHARES) + share


@inlined
def observe(drafted: Int32Array, cells: Int32Array, came: Int32Array, accept_probs: Float64Array) -> None:
    """Counts which tokens of a draft, of which there are drafted[0], were those that came."""
    for i in range(min(drafted[0], came.size)):
        cell = cells[i + 1]
        if accept_probs[0, cell] > MEMORY:
            accept_probs[:, cell] *= 0.5
        accept_probs[0, cell] += 1
        if drafted[i + 1] != came[i]:
            break
        accept_probs[1, cell] += 1
