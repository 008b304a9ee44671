"""Tracks drafts on the host until they are verified, counts them, and learns acceptance probabilities from them, as
engine/v2/feedback does on the device. R: requests of a step, S: rows of requests (SlotTable), M: stages."""

from collections.abc import Sequence

import numpy as np

from vllm_specplugins.counters import StageCounters, count_all
from vllm_specplugins.draft import Draft, Int32Array
from vllm_specplugins.kernels.acceptance import HOST_PRIOR_WEIGHT, Drafts, State, host
from vllm_specplugins.kernels.acceptance.reference import new_state
from vllm_specplugins.kernels.steps import ACCEPTED, KINDS, SUMS
from vllm_specplugins.structures.arrays import Floats, Ints, with_room
from vllm_specplugins.structures.drafts import DraftArrays, dense_logits


class DraftTracker:
    """Tables that grow with the number of requests. `state` belongs to the acceptance model. `whole` [S, M] has the
    length of each stage's part of the newest draft if that part was accepted as a whole, and 0 otherwise."""

    def __init__(self, num_stages: int, max_num_draft: int, prior_weight: float = HOST_PRIOR_WEIGHT):
        self._prior_weight = prior_weight
        state = new_state(num_stages, 1, max_num_draft, "cpu", prior_weight)
        self.state, self.whole = State(*(array.numpy() for array in state)), np.zeros((1, num_stages))
        self._extended = np.zeros((num_stages, 2))
        self._by_place = np.zeros((num_stages, len(KINDS), max_num_draft), np.int64)
        self._by_stage = np.zeros((num_stages, len(SUMS)), np.int64)
        self._lengths = np.zeros((num_stages, max_num_draft + 1), np.int64)
        self._num_accepted = np.zeros(num_stages, np.int64)  # counts that were already moved

    def make_room(self, num_rows: int) -> None:
        if num_rows > len(self.whole):
            tried, accepted, shared_tried, shared_accepted, *sent = self.state
            tried, accepted, *sent = (with_room(array, num_rows) for array in (tried, accepted, *sent))
            self.state = State(tried, accepted, shared_tried, shared_accepted, *sent)
            self.whole = with_room(self.whole, num_rows)

    def keep(self, rows: Ints, drafts: DraftArrays) -> Draft:
        """Stores and counts the newest drafts of requests with these rows; returns them for the runner."""
        host.keep(self.state, rows, rated(drafts), self._by_place, self._by_stage)
        width = int(drafts.num_draft.max(initial=0))
        num_draft = drafts.num_draft.astype(np.int32)
        return Draft(drafts.token_ids[:, :width], num_draft, logits=dense_logits(drafts, width))

    def observe(
        self, rows: Ints, num_verified: Int32Array, num_accepted: Int32Array, num_refused: Int32Array | None = None
    ) -> None:
        """Counts the outcome of the newest drafts, [R] tokens each, learns from it, and drops the drafts."""
        refused = np.zeros(len(rows), np.int64) if num_refused is None else num_refused.astype(np.int64)
        outcome = num_verified.astype(np.int64), num_accepted.astype(np.int64), refused
        host.observe(self.state, rows, *outcome, self.whole, self._extended, self._by_place)

    def accept_probs(self, rows: Ints, drafts: Drafts) -> Floats:
        """Returns each token's acceptance probability, [R, K], 0 after a draft's end."""
        probs = np.empty(drafts.confidence.shape)
        host.predict(self.state, rows, drafts, self._prior_weight, probs)
        return probs

    def survivals(self, rows: Ints, drafts: Drafts) -> Floats:
        """Returns the probability that a draft is accepted up to each token, [R, K]."""
        survivals: Floats = self.accept_probs(rows, drafts).cumprod(axis=1)
        return survivals

    def rates(self, rows: Ints, stage: int) -> Floats:
        """Returns the acceptance rate of all tokens of a stage, [R]."""
        tried, accepted, shared_tried, shared_accepted, *_ = self.state
        weight, prior = self._prior_weight, shared_accepted[stage].sum() / shared_tried[stage].sum()
        rates: Floats = (accepted[rows, stage].sum(axis=1) + weight * prior) / (tried[rows, stage].sum(axis=1) + weight)
        return rates

    def copied(self, rows: Ints, num_accepted: Int32Array, stage: int, min_length: int) -> bool:
        """Returns whether each request had at least `min_length` draft tokens, all accepted, the last one from another
        stage."""
        num_draft = self.state.num_sent[rows]
        last = self.state.sent_stage[rows, np.maximum(num_draft, 1) - 1]
        return bool(((num_draft >= min_length) & (num_draft == num_accepted) & (last != stage)).all())

    def continued(self, stage: int) -> float:
        """Returns the mean number of accepted lookup tokens after a draft of this stage that was accepted as a
        whole."""
        number, num_tokens = self._extended[stage].tolist()
        return float(num_tokens / (number + 1))

    def has_tried(self, stage: int) -> bool:
        """Returns whether the tried first tokens of a stage outweigh its prior."""
        return bool(self.state.shared_tried[stage, 0] >= 2 * HOST_PRIOR_WEIGHT)

    def num_accepted(self, stage: int) -> int:
        """Returns the number of a stage's accepted tokens so far."""
        return int(self._num_accepted[stage] + self._by_place[stage, ACCEPTED].sum())

    def clear(self, rows: Ints) -> None:
        for array in (self.state.num_sent, self.state.tried, self.state.accepted, self.whole):
            array[rows] = 0

    def add_lengths(self, stage: int, lengths: Ints, limits: Ints) -> None:
        """Counts the lengths [R] that a gate chose for the requests that may have tokens of a stage."""
        self._lengths[stage] += np.bincount(lengths[limits > 0], minlength=self._lengths.shape[1])

    def move_to(self, stages: Sequence[StageCounters]) -> None:
        """Adds the counts to the stages' totals, and resets them."""
        self._num_accepted += self._by_place[:, ACCEPTED].sum(axis=1)
        tables = self._by_place, self._by_stage, self._lengths
        for stage, by_place, by_stage, lengths in zip(stages, *tables, strict=True):
            stage.add(by_place, by_stage)
            count_all(stage.gate_lengths, lengths)
        for table in tables:
            table[:] = 0


def rated(drafts: DraftArrays) -> Drafts:
    return Drafts(drafts.num_draft, np.ascontiguousarray(drafts.stage), np.ascontiguousarray(drafts.confidence))
