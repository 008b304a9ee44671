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

from vllm_specplugins.cascade import staged_numba as host
from vllm_specplugins.cascade.drafters import Drafter
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.draft_arrays import Array, DraftArrays, columns, nothing, of_stage, picked, stacked
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
        length = host.num_fed(self._num_tokens, self._ends, guess.num_draft, is_first)
        text, firsts = np.empty_like(self._token_ids), np.empty(num_reqs, np.int64)
        fed, positions = np.empty((num_reqs, length), np.int32), np.empty((num_reqs, length), np.int64)
        histories = self._newest, self._lengths, stage.max_position
        host.feed(*known, guess.token_ids, guess.num_draft, *histories, text, firsts, fed, positions)
        chosen, logits = stage.next_tokens(target, fed, positions, text, firsts)
        choices, num_logits = _array(chosen, np.int32), sum(map(len, self._logits))
        num_kept, num_new = host.keep(*known, text, guess.num_draft, choices, firsts, num_logits, self._q)
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
class ModelDrafter:
    """The model stage with this index by itself, token by token. One that is no exit only begins drafts: it needs the
    target's last state."""

    stage: Any
    index: int
    counters: StageCounters

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        assert batch.target is not None
        if prefix is not None and not isinstance(self.stage, EarlyExit):
            max_draft, prefix = np.where(prefix.num_draft == 0, max_draft, 0), None
        num_steps, num_reqs = max(max_draft.tolist(), default=0), len(max_draft)
        if num_steps == 0:
            return nothing(num_reqs, self.stage.max_num_draft)
        start = time.perf_counter()
        behind: tuple[torch.Tensor, ...] = ()
        if prefix is not None:
            # Rows that want nothing start at their newest token: after it no slot is read that was not written.
            lengths = prefix.num_draft * (max_draft > 0)
            if longest := max(lengths.tolist()):
                device = batch.target.num_tokens.device
                fed = np.ascontiguousarray(prefix.token_ids[:, :longest])
                behind = torch.from_numpy(fed).to(device), torch.from_numpy(lengths).to(device)
        chosen, logits = self.stage.draft_from(batch.target, num_steps, *behind)
        token_ids = np.zeros((num_reqs, self.stage.max_num_draft), np.int32)
        token_ids[:, :num_steps] = chosen.cpu().numpy()
        q = None
        if logits is not None:
            q = np.arange(0, num_reqs * num_steps, num_steps)[:, None] + columns(token_ids)
            logits = logits.flatten(0, 1)
        self.counters.asked += int(np.count_nonzero(max_draft))
        self.counters.drafted += sum(max_draft.tolist())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return of_stage(self.index, token_ids, max_draft, np.full(num_reqs, FIRST_CONFIDENCE), q, logits)


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
            guess = self.cheap.draft(batch, known.so_far, known.guessable)
            start_s = time.perf_counter()
            num_kept, num_new = known.check(self.stage, batch.target, guess, is_first)
            is_first = False
            self.counters.drafted += num_new
            if self.cheap_counters is not None:
                self.cheap_counters.kept += num_kept
            self.counters.ms += (time.perf_counter() - start_s) * 1000
        return known.own(self.index, prefix)
