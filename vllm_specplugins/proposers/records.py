"""How often drafts were right, by request, stage and grade of confidence: in arrays, one row for each request.

Drafts are right all along or not at all far more often than a constant rate would have them: where a match of 3 tokens
was right about the next one, it is a match of 4. So a token's grade goes by its confidence, which grows along a draft.
R: requests of a step, K: most tokens of a draft, S: stages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DECAY = 0.8  # of a request's record of a stage, by draft; half of it is forgotten after three drafts
SHARED_DECAY = 0.98  # of the record of all requests
PRIOR_WEIGHT = 4.0  # the record of all requests counts as so many tokens of a request's own
FIRST_GUESS = 0.6  # acceptance of a stage that was never tried
NUM_GRADES = 4

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]


def grades(confidence: npt.NDArray[np.floating]) -> Ints:
    """0 to 3: grades of confidence. A match of 2 tokens says little, one of 8 a lot.

    >>> grades(np.array([1, 2, 3, 4, 6, 8, 16.0])).tolist()
    [0, 0, 1, 1, 2, 2, 3]
    """
    return np.searchsorted((2.0, 4.0, 8.0), confidence)


def with_room(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """The array, or a longer one that begins like it, where it has fewer rows than that."""
    if num_rows <= len(array):
        return array
    return np.concatenate((array, np.zeros((max(num_rows - len(array), len(array)), *array.shape[1:]), array.dtype)))


class Rows:
    """Which row of our arrays a request has, from its first draft until it is forgotten. Row 0 is nobody's."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._newest: tuple[Sequence[str] | None, Ints] = (None, np.empty(0, np.int64))  # what was asked for last
        self._free: list[int] = []
        self.num_rows = 1

    def of(self, request_ids: Sequence[str]) -> Ints:
        """[R], rows of these requests; those that are new get one."""
        if request_ids is self._newest[0]:
            return self._newest[1]
        for request_id in request_ids:
            if request_id not in self._rows:
                if not self._free:
                    self._free.append(self.num_rows)
                    self.num_rows += 1
                self._rows[request_id] = self._free.pop()
        self._newest = request_ids, np.array([self._rows[request_id] for request_id in request_ids], np.int64)
        return self._newest[1]

    def known(self, request_ids: Sequence[str]) -> Ints:
        """[R], rows of these requests, 0 for those that have none."""
        return np.array([self._rows.get(request_id, 0) for request_id in request_ids], np.int64)

    def forget(self, request_ids: Sequence[str]) -> Ints:
        """The rows that these requests had, which others may get now."""
        self._newest = None, self._newest[1]
        rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
        self._free.extend(rows)
        return np.array(rows, np.int64)


class Records:
    """Decaying counts of tokens that could have been accepted, and of those that were."""

    def __init__(self, num_stages: int):
        self._counts = np.zeros((1, num_stages, NUM_GRADES, 2))  # tried, accepted
        self._shared = np.zeros((num_stages, NUM_GRADES, 2))  # of all requests
        self.whole = np.zeros((1, num_stages), np.int64)  # length of the last draft if all of it was accepted

    def make_room(self, num_rows: int) -> None:
        """For so many requests."""
        self._counts, self.whole = with_room(self._counts, num_rows), with_room(self.whole, num_rows)

    def clear(self, rows: Ints) -> None:
        """Forgets these requests."""
        self._counts[rows], self.whole[rows] = 0.0, 0

    def chances(self, rows: Ints, stage: int, confidence: Floats) -> Floats:
        """[R, K]: chance that each token of a stage is accepted, the ones before it being right.

        Args:
            confidence: [R, K], of the tokens.
        """
        shared, own = self._shared[stage], self._counts[rows, stage]
        prior = (shared[:, 1] + PRIOR_WEIGHT * FIRST_GUESS) / (shared[:, 0] + PRIOR_WEIGHT)
        rates = (own[:, :, 1] + PRIOR_WEIGHT * prior) / (own[:, :, 0] + PRIOR_WEIGHT)
        found: Floats = rates.ravel().take(grades(confidence) + np.arange(0, rates.size, NUM_GRADES)[:, None])
        return found

    def add(self, rows: Ints, stage: Ints, confidence: Floats, num_draft: Ints, num_accepted: Ints) -> None:
        """What became of drafts: tokens behind the first rejected one were not tried.

        Args:
            stage, confidence: [R, K], of the tokens.
            num_draft, num_accepted: [R].
        """
        num_reqs, width = stage.shape
        num_stages = self.whole.shape[1]
        places = np.arange(width)
        is_drafted, is_accepted = places < num_draft[:, None], places < num_accepted[:, None]
        is_tried = is_drafted & (places <= num_accepted[:, None])
        bins = (stage + np.arange(0, num_reqs * num_stages, num_stages)[:, None]) * NUM_GRADES + grades(confidence)
        size = num_reqs * num_stages * NUM_GRADES
        tried, accepted = (
            np.bincount(bins[mask], minlength=size).reshape(num_reqs, num_stages, NUM_GRADES)
            for mask in (is_tried, is_drafted & is_accepted)
        )
        more = np.stack((tried, accepted), axis=-1)
        is_new = (tried > 0)[..., None]
        own = self._counts[rows]
        self._counts[rows] = np.where(is_new, own * DECAY + more, own)
        # As if one draft after the other had been added.
        later = np.cumsum(is_new[::-1], axis=0)[::-1]
        weights = SHARED_DECAY ** (later - is_new)
        self._shared = self._shared * SHARED_DECAY ** later[0] + (more * weights).sum(axis=0)
        lengths = np.bincount((bins // NUM_GRADES)[is_drafted], minlength=num_reqs * num_stages)
        lengths = lengths.reshape(num_reqs, num_stages)
        is_whole = accepted.sum(axis=2) == lengths
        self.whole[rows] = np.where(is_new[..., 0].any(axis=2), np.where(is_whole, lengths, 0), self.whole[rows])
