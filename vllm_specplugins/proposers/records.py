"""How often drafts were right, by request, stage and grade of confidence: in arrays, one row for each request.

Drafts are right all along or not at all far more often than a constant rate would have them: where a match of 3 tokens
was right about the next one, it is a match of 4. So a token's grade goes by its confidence, which grows along a draft.
The arrays are NumPy's or torch's. R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.proposers.drafted import Array, clear, columns, like, namespace, picked, tally, up_to, zeros
from vllm_specplugins.proposers.host import records as host

DECAY = 0.8  # of a request's record of a stage, by draft; half of it is forgotten after three drafts
SHARED_DECAY = 0.98  # of the record of all requests
PRIOR_WEIGHT = 4.0  # the record of all requests counts as so many tokens of a request's own
# What the record of all requests begins with, as if so many tokens had been tried, by grade: a long match stands alone,
# a short one hardly. One guess for all is less than what a token may cost many requests: drafts would end where a grade
# begins, and it would stay untried.
FIRST_GUESSES = 0.5, 0.65, 0.8, 0.9
NUM_GRADES = len(FIRST_GUESSES)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]


def grades(confidence: Array) -> Array:
    """0 to 3: grades of confidence. A match of 2 tokens says little, one of 8 a lot.

    >>> grades(np.array([1, 2, 3, 4, 6, 8, 16.0])).tolist()
    [0, 0, 1, 1, 2, 2, 3]
    """
    return (confidence > 2) * 1 + (confidence > 4) + (confidence > 8)


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
        if request_ids == self._newest[0]:
            return self._newest[1]
        for request_id in request_ids:
            if request_id not in self._rows:
                if not self._free:
                    self._free.append(self.num_rows)
                    self.num_rows += 1
                self._rows[request_id] = self._free.pop()
        self._newest = request_ids[:], np.array([self._rows[request_id] for request_id in request_ids], np.int64)
        return self._newest[1]

    def known(self, request_ids: Sequence[str]) -> Ints:
        """[R], rows of these requests, 0 for those that have none."""
        if request_ids == self._newest[0]:
            return self._newest[1]
        return np.array([self._rows.get(request_id, 0) for request_id in request_ids], np.int64)

    def forget(self, request_ids: Sequence[str]) -> Ints:
        """The rows that these requests had, which others may get now."""
        self._newest = None, self._newest[1]
        rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
        self._free.extend(rows)
        return np.array(rows, np.int64)


class Records:
    """Decaying counts of tokens that could have been accepted, and of those that were.

    On the host they grow with the requests; on a device they have as many rows as they ever need.
    """

    def __init__(self, num_stages: int, num_rows: int = 1, device: Any = None):
        shape = (num_rows, num_stages, NUM_GRADES)
        self._tried, self._accepted = zeros(shape, device), zeros(shape, device)
        self._shared_tried, self._shared_accepted = zeros(shape[1:], device), zeros(shape[1:], device)
        self._shared_tried += PRIOR_WEIGHT
        for grade, guess in enumerate(FIRST_GUESSES):
            self._shared_accepted[:, grade] = PRIOR_WEIGHT * guess
        self.whole = zeros(shape[:2], device)  # length of the last draft if all of it was accepted

    @property
    def on_host(self) -> tuple[Any, ...]:
        """What the compiled functions go by."""
        return (
            *(self._tried, self._accepted, self._shared_tried, self._shared_accepted),
            PRIOR_WEIGHT,
        )

    def make_room(self, num_rows: int) -> None:
        """For so many requests, on the host."""
        if num_rows > len(self.whole):
            self._tried, self._accepted, self.whole = (
                with_room(array, num_rows) for array in (self._tried, self._accepted, self.whole)
            )

    def clear(self, rows: Array) -> None:
        """Forgets these requests."""
        for array in (self._tried, self._accepted, self.whole):
            clear(array, rows)

    def chances(self, rows: Array, stage: int | Array, confidence: Array) -> Array:
        """[R, K]: chance that each token is accepted, the ones before it being right.

        Args:
            rows: [R] int64.
            stage: of all of these tokens, or [R, K], of each.
            confidence: [R, K], of the tokens.
        """
        if isinstance(confidence, np.ndarray) and isinstance(stage, int):
            found = np.empty_like(confidence)
            host.chances(found, self.on_host, rows, stage, confidence)
            return found
        prior = self._shared_accepted / self._shared_tried
        rates = (self._accepted[rows] + PRIOR_WEIGHT * prior) / (self._tried[rows] + PRIOR_WEIGHT)
        return picked(rates.reshape(len(rows), -1), stage * NUM_GRADES + grades(confidence))

    def rate(self, rows: Array, stage: int) -> Array:
        """[R]: share of a stage's tokens that are accepted, however sure it is of them."""
        prior = self._shared_accepted[stage].sum() / self._shared_tried[stage].sum()
        tried, accepted = (array[rows, stage].sum(axis=1) for array in (self._tried, self._accepted))
        return (accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)

    def add(self, rows: Array, stage: Array, confidence: Array, num_draft: Array, num_accepted: Array) -> None:
        """What became of drafts: tokens behind the first rejected one were not tried.

        Args:
            rows: [R] int64.
            stage, confidence: [R, K], of the tokens.
            num_draft, num_accepted: [R].
        """
        if isinstance(stage, np.ndarray):
            counts = self._tried, self._accepted, self._shared_tried, self._shared_accepted, self.whole
            fates = num_draft.astype(np.int64), num_accepted.astype(np.int64)
            host.add(*counts, rows, stage, confidence, *fates, DECAY, SHARED_DECAY)
            return
        xp, places, shape = namespace(stage), columns(stage), (len(rows), *self._tried.shape[1:])
        is_drafted, is_accepted = places < num_draft[:, None], places < num_accepted[:, None]
        # Of its request, stage and grade.
        cells = (up_to(shape[0], stage)[:, None] * shape[1] + stage) * NUM_GRADES + grades(confidence)
        size = shape[0] * shape[1] * NUM_GRADES
        drafted, tried, accepted = (
            tally(cells, mask, size).reshape(shape)
            for mask in (is_drafted, is_drafted & (places <= num_accepted[:, None]), is_drafted & is_accepted)
        )
        is_new = tried > 0
        keep = 1.0 - (1 - DECAY) * like(is_new, tried)
        self._tried[rows] = self._tried[rows] * keep + tried
        self._accepted[rows] = self._accepted[rows] * keep + accepted
        # As if one draft after the other had been added.
        so_far = xp.cumsum(like(is_new, tried), axis=0)
        keep, weights = SHARED_DECAY ** so_far[-1], SHARED_DECAY ** (so_far[-1] - so_far)
        for shared, found in ((self._shared_tried, tried), (self._shared_accepted, accepted)):
            shared *= keep  # in place, where a graph finds it again
            shared += (found * weights).sum(axis=0)
        lengths, num_right = drafted.sum(axis=2), accepted.sum(axis=2)
        whole = xp.where(lengths == num_right, lengths, 0.0)
        self.whole[rows] = xp.where(is_new.any(axis=2), whole, self.whole[rows])
