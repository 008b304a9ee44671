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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.request_options import allows
from vllm_specplugins.structures.arrays import (
    FIRST_CONFIDENCE,
    Array,
    DraftArrays,
    Ints,
    columns,
    of_stage,
    picked,
    stacked,
)
from vllm_specplugins.target import Target

# Continues drafts: at most so many tokens [num_reqs] for each request, after its history and the prefix of its draft.
Drafter = Callable[[DraftBatch, DraftArrays | None, Array], DraftArrays]


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
        known, rows = self._num_tokens, np.arange(len(self._ends))[:, None]
        is_asked, places = known < self._ends, columns(self._token_ids)
        num_text = known + guess.num_draft
        is_known, follows = places < known[:, None], picked(guess.token_ids, places - known[:, None])
        text = np.where(is_known, self._token_ids, follows)
        # What was fed is left out, but for rows that need fewer tokens than others.
        length = int(np.where(is_asked, num_text + 1 if is_first else guess.num_draft + 1, 0).max())
        firsts = np.where(is_asked, (num_text + 1 - length).clip(min=0), 0)
        at = firsts[:, None] + np.arange(length)
        fed = np.where(at > 0, picked(text, at - 1), self._newest[:, None])
        positions = np.minimum(self._lengths[:, None] - 1 + at, stage.max_position)
        chosen, logits = stage.next_tokens(target, fed, positions, text, firsts)
        choices = picked(_array(chosen, np.int32), places - firsts[:, None])
        is_right = is_known | ((choices == text) & (places < num_text[:, None]))
        num_right = is_right.cumprod(axis=1).sum(axis=1)
        self._num_tokens = np.where(is_asked, np.minimum(num_right + 1, self._ends), known)
        is_new = ~is_known & (places < self._num_tokens[:, None])
        q = sum(map(len, self._logits)) + rows * length + places - firsts[:, None]
        self._token_ids, self._q = np.where(is_new, choices, self._token_ids), np.where(is_new, q, self._q)
        if logits is not None:
            self._logits.append(logits.reshape(-1, logits.shape[-1]))
        num_new = int(is_new.sum())
        self._num_missing -= num_new
        return int((num_right - known)[is_asked].sum()), num_new

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


def checked(stages: Sequence[Any], batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
    """What stages of a cascade draft, each checked by the next; without it where options do not allow it."""
    *cheaper, stage = stages
    limits = stage.limits(batch, max_draft)
    if not cheaper:
        own: DraftArrays = stage.draft(batch, prefix, limits)
        return own
    cheap, allowed = partial(checked, cheaper), allows(batch.options, stage.name)
    drafter = StagedDrafter(cheap, stage.proposer, stage.index, stage.counters, cheaper[-1].counters)
    drafts = drafter.draft(batch, prefix, limits)
    if allowed is None:
        return drafts
    return drafts.followed_by(cheap(batch, prefix, np.where(allowed, 0, max_draft)))
