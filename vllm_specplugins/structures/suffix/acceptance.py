"""Learns the acceptance probability of a suffix draft's token by source, length of the match and share of the votes."""

import numpy as np
import numpy.typing as npt

from vllm_specplugins.kernels.compiled import inlined
from vllm_specplugins.structures.suffix.ring import Int32Array

Float64Array = npt.NDArray[np.float64]

MEMORY = 1024.0  # a cell's counts are halved beyond so many tokens
PRIOR_WEIGHT = 8.0  # tokens that a prior counts as
PRIORS = (0.3, 0.5, 0.6, 0.75, 0.85, 0.92, 0.96)  # by grade of the match, where all places agree
SHARE_FACTORS = (0.9, 0.35, 0.65, 0.85, 1.0)  # of the prior, by share of the votes


def first_accept_probs() -> Float64Array:
    """Returns tried and accepted tokens of each cell, [2, cells] float64, with the priors in them."""
    accepted = np.tile(np.outer(PRIORS, SHARE_FACTORS).ravel(), 2)
    return PRIOR_WEIGHT * np.stack([np.ones_like(accepted), accepted])


@inlined
def cell_of(is_stored: bool, length: int, votes: int, num_places: int) -> int:
    """Returns the cell of a token after a match of `length` tokens, in the store or in the request's texts. Share 0 is
    a single place, share 4 several places that agree."""
    grade = (length > 1) + (length > 2) + (length > 3) + (length > 5) + (length > 8) + (length > 16)
    share = 0
    if num_places > 1:
        share = 1 + (2 * votes > num_places) + (4 * votes > 3 * num_places) + (votes == num_places)
    return (is_stored * len(PRIORS) + grade) * len(SHARE_FACTORS) + share


@inlined
def observe(draft: Int32Array, cells: Int32Array, new_tokens: Int32Array, accept_probs: Float64Array) -> None:
    """Counts the tokens draft[1 : 1 + draft[0]] as tried, and as accepted up to the first that is not the new token."""
    for i in range(min(draft[0], new_tokens.size)):
        cell = cells[i + 1]
        if accept_probs[0, cell] > MEMORY:
            accept_probs[:, cell] *= 0.5
        accept_probs[0, cell] += 1
        if draft[i + 1] != new_tokens[i]:
            break
        accept_probs[1, cell] += 1
