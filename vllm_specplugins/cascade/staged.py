"""The policy `verify`: a model stage checks what a cheap drafter offers.

This is staged speculative decoding (Spector and Re 2023; Chen et al. 2023, "Cascade speculative drafting"): a
cheap drafter's tokens are checked by a model stage in one forward pass, corrected and extended. Its tokens are those
that the model stage alone would draft. Proof: given the tokens before it, the stage's choice at a position is a
function of its logits and of noise that depends on (seed, position) alone: the likeliest
token, or a draw from its q. A cheap token is kept only if it is that choice, and replaced by it otherwise; by induction
over the positions every token is the stage's own, and so is its q. Two model stages that share their noise agree about
as often as any acceptance rule could make them (Daliri et al. 2025, "Coupling without communication").
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import types

from vllm_specplugins.cascade.drafters import Drafter
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.compiled import compiled
from vllm_specplugins.structures.draft_arrays import Array, DraftArrays, columns, of_stage, picked, stacked
from vllm_specplugins.structures.slots import Ints
from vllm_specplugins.target import Target


class PartialDraft:
    """What stands after each request's history so far: a draft that was begun, and after it the stage's own tokens.

    Args:
        prefix: that draft; None: no tokens.
        max_draft: [num_reqs] int64, how many tokens of the stage there shall be.
        target: whose newest tokens and lengths are those of the histories.
        max_num_draft: K.
    """

    def __init__(self, prefix: DraftArrays | None, max_draft: Ints, target: Target, max_num_draft: int):
        shape = len(max_draft), max_num_draft
        self._token_ids, self._q = np.zeros(shape, np.int32), np.full(shape, -1, np.int64)
        self._num_tokens = np.zeros(len(max_draft), np.int64)
        self._num_missing: int = sum(max_draft.tolist())
        if prefix is not None:
            self._token_ids[:], self._num_tokens[:] = prefix.token_ids, prefix.num_draft
        self._ends: Ints = self._num_tokens + max_draft
        self._newest, self._lengths = _array(target.last_token_ids, np.int32), _array(target.num_tokens, np.int64)
        self._logits: list[Any] = []  # of the passes so far, if the stage samples: [N, vocab_size] each

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._num_missing == 0

    @property
    def guessable(self) -> Ints:
        """[num_reqs] int64, tokens that are missing, but for one: the stage's own choice comes after a guess."""
        guessable: Ints = np.maximum(self._ends - self._num_tokens - 1, 0)
        return guessable

    @property
    def so_far(self) -> DraftArrays:
        """What is known, for drafters that continue it."""
        return DraftArrays(self._token_ids, self._num_tokens, self._q, self._q)

    def check(self, stage: EarlyExit, target: Target, guess: DraftArrays, is_first: bool) -> tuple[int, int]:
        """One pass: each draft goes on by the guess as far as the stage agrees, and by its next choice.

        Args:
            guess: to follow what is known, at most `guessable` tokens.
            is_first: whether no token was fed before.

        Returns how many tokens of the guesses were right, and how many tokens are known now that were not.
        """
        known, num_reqs = (self._token_ids, self._num_tokens, self._ends), len(self._ends)
        length = _num_fed(self._num_tokens, self._ends, guess.num_draft, is_first)
        text, firsts = np.empty_like(self._token_ids), np.empty(num_reqs, np.int64)
        fed, positions = np.empty((num_reqs, length), np.int32), np.empty((num_reqs, length), np.int64)
        histories = self._newest, self._lengths, stage.max_position
        _feed(*known, guess.token_ids, guess.num_draft, *histories, text, firsts, fed, positions)
        chosen, logits = stage.next_tokens(target, fed, positions, text, firsts)
        choices, num_logits = _array(chosen, np.int32), sum(map(len, self._logits))
        num_kept, num_new = _keep(*known, text, guess.num_draft, choices, firsts, num_logits, self._q)
        if logits is not None:
            self._logits.append(logits.reshape(-1, logits.shape[-1]))
        self._num_missing -= num_new
        return num_kept, num_new

    def own(self, index: int, prefix: DraftArrays | None) -> DraftArrays:
        """The stage's own tokens, without the draft that was begun."""
        token_ids, num_draft, q = self._token_ids, self._num_tokens, self._q
        if prefix is not None:
            places = columns(token_ids) + prefix.num_draft[:, None]
            token_ids, num_draft, q = picked(token_ids, places), num_draft - prefix.num_draft, picked(q, places)
        confidence = np.full(len(num_draft), FIRST_CONFIDENCE)
        if not self._logits:
            return of_stage(index, token_ids, num_draft, confidence)
        return of_stage(index, token_ids, num_draft, confidence, q, stacked(self._logits))


def _array(tensor: torch.Tensor, dtype: Any) -> Any:
    """What a tensor holds, contiguous; it is waited for."""
    return np.ascontiguousarray(tensor.cpu().numpy(), dtype)


@dataclass(slots=True)
class StagedDrafter:
    """`cheap` drafts, the model stage with this index checks it in one pass and extends it."""

    cheap: Drafter
    stage: EarlyExit
    index: int
    counters: StageCounters
    cheap_counters: StageCounters | None = None

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        assert batch.target is not None
        self.counters.asked += int(np.count_nonzero(max_draft))
        known, is_first = PartialDraft(prefix, max_draft, batch.target, self.stage.max_num_draft), True
        while not known.is_whole:
            guess = self.cheap(batch, known.so_far, known.guessable)
            start_s = time.perf_counter()
            num_kept, num_new = known.check(self.stage, batch.target, guess, is_first)
            is_first = False
            self.counters.drafted += num_new
            if self.cheap_counters is not None:
                self.cheap_counters.kept += num_kept
            self.counters.ms += (time.perf_counter() - start_s) * 1000
        return known.own(self.index, prefix)


_ids, _ints, _places = types.int32[:, ::1], types.int64[::1], types.int64[:, ::1]


@compiled(types.int64(_ints, _ints, _ints, types.boolean))
def _num_fed(num_tokens: Any, ends: Any, num_guess: Any, is_first: bool) -> int:
    """How many tokens of each request a pass must feed: after those that were fed, or else the newest and all."""
    longest = 0
    for row in range(len(num_tokens)):
        if num_tokens[row] < ends[row]:
            longest = max(longest, 1 + num_guess[row] + (num_tokens[row] if is_first else 0))
    return longest


@compiled(types.void(_ids, _ints, _ints, _ids, _ints, types.int32[::1], _ints, types.int64, _ids, _ints, _ids, _places))
def _feed(
    token_ids: Any,
    num_tokens: Any,
    ends: Any,
    guess_ids: Any,
    num_guess: Any,
    newest: Any,
    lengths: Any,
    max_position: int,
    text: Any,
    firsts: Any,
    fed: Any,
    positions: Any,
) -> None:
    """What is known and after it the guess, into `text` [R, K]; what of that is fed, into `firsts` [R], which tokens
    begin, and `fed` and `positions` [R, T].

    Args:
        newest: [R], each history's newest token.
        lengths: [R], of the histories.
    """
    width, num_fed = text.shape[1], fed.shape[1]
    for row in range(len(num_tokens)):
        known = num_tokens[row]
        for place in range(width):
            text[row, place] = token_ids[row, place] if place < known else guess_ids[row, place - known]
        num_text = known + num_guess[row]
        first = num_text + 1 - num_fed if known < ends[row] and num_text >= num_fed else 0
        firsts[row] = first
        for place in range(num_fed):
            fed[row, place] = text[row, first + place - 1] if first + place > 0 else newest[row]
            positions[row, place] = min(lengths[row] - 1 + first + place, max_position)


@compiled(types.UniTuple(types.int64, 2)(_ids, _ints, _ints, _ids, _ints, _ids, _ints, types.int64, _places))
def _keep(
    token_ids: Any,
    num_tokens: Any,
    ends: Any,
    text: Any,
    num_guess: Any,
    choices: Any,
    firsts: Any,
    num_logits: int,
    q: Any,
) -> tuple[int, int]:
    """Goes on with what is known, by the stage's choices [R, T] after what was fed; how many tokens of the guesses
    were right, and how many are known now that were not."""
    num_kept, num_new = 0, 0
    for row in range(len(num_tokens)):
        known, first = num_tokens[row], firsts[row]
        if known >= ends[row]:
            continue
        right, end = known, known + num_guess[row]
        while right < end and choices[row, right - first] == text[row, right]:
            right += 1
        num_tokens[row] = min(right + 1, ends[row])
        for place in range(known, num_tokens[row]):
            token_ids[row, place] = choices[row, place - first]
            q[row, place] = num_logits + row * choices.shape[1] + place - first
        num_kept += right - known
        num_new += num_tokens[row] - known
    return num_kept, num_new
