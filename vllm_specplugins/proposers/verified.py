"""The policy `verify`: a model stage checks what a cheap drafter offers.

This is staged speculative decoding (Spector and Re 2023; Chen et al. 2023, "Cascade speculative drafting"): a
cheap drafter's tokens are checked by a model stage in one forward pass, corrected and extended. Its tokens are those
that the model stage alone would draft. Proof: given the tokens before it, the stage's choice at a position is a
function of its logits and of noise that depends on (seed, position) alone: the argmax of logits / temperature + Gumbel
noise, a draw from its q. A cheap token is kept only if it is that choice, and replaced by it otherwise; by induction
over the positions every token is the stage's own, and so is its q. Two model stages that share their noise agree about
as often as any acceptance rule could make them (Daliri et al. 2025, "Coupling without communication").
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import DraftBatch, StageCounters, Target
from vllm_specplugins.proposers.drafted import (
    Array,
    Drafted,
    columns,
    namespace,
    nothing,
    of_stage,
    picked,
    stacked,
    up_to,
)
from vllm_specplugins.proposers.drafters import Drafter
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE
from vllm_specplugins.proposers.jump import Jump


@dataclass(slots=True)
class Known:
    """What stands behind each request's history so far: a draft that was begun, and behind it the stage's own tokens.

    Args:
        token_ids: [num_reqs, K] int32.
        num_tokens: [num_reqs] int, how many of these are known.
        ends: [num_reqs] int, how many there shall be.
        q: [num_reqs, K] int64, the row of all `logits` together that a token was drawn from.
        logits: of the passes so far, if the stage samples: [N, vocab_size] each.
    """

    token_ids: Array
    num_tokens: Array
    ends: Array
    q: Array
    logits: list[Any] = field(default_factory=list)

    def check(self, stage: EarlyExit, target: Target, guess: Drafted, length: int) -> Array:
        """One pass: each draft goes on by the guess as far as the stage agrees, and by its next choice.

        Args:
            guess: to follow what is known, at least one token shorter than what is missing.
            length: how many tokens of each request are fed.

        Returns [num_reqs] int, how many tokens of the guess were right.
        """
        xp, places = namespace(self.token_ids), columns(self.token_ids)
        is_known = places < self.num_tokens[:, None]
        text = xp.where(is_known, self.token_ids, picked(guess.token_ids, places - self.num_tokens[:, None]))
        num_text = self.num_tokens + guess.num_draft
        # Rows that need fewer tokens are fed some again, to the same effect, or else some behind their end.
        firsts = xp.where((self.num_tokens < self.ends) & (num_text >= length), num_text + 1 - length, 0)
        newest = _beside(target.last_token_ids, text)[:, None]
        fed = picked(xp.concatenate((newest, text), axis=1), firsts[:, None] + up_to(length, text))
        chosen, logits = stage.choose(target, fed, firsts)
        own_places = places - firsts[:, None]
        choices = picked(_beside(chosen.to(torch.int32), text), own_places)
        is_right = is_known | ((text == choices) & (places < num_text[:, None]))
        num_right = xp.cumprod(is_right, axis=1).sum(axis=1)
        if logits is not None:
            starts = up_to(len(text), text)[:, None] * length + sum(map(len, self.logits))
            self.q = xp.where(is_known, self.q, own_places + starts)
            self.logits.append(logits.reshape(-1, logits.shape[-1]))
        num_kept = xp.where(self.num_tokens < self.ends, num_right - self.num_tokens, 0)
        self.token_ids = xp.where(is_known, self.token_ids, choices)
        self.num_tokens = xp.minimum(num_right + 1, self.ends)
        return num_kept

    @property
    def so_far(self) -> Drafted:
        """What is known, for drafters that continue it."""
        return Drafted(self.token_ids, self.num_tokens, self.q, self.q)

    def own(self, index: int, begun: Drafted | None) -> Drafted:
        """The stage's own tokens, without the draft that was begun."""
        token_ids, num_draft, q = self.token_ids, self.num_tokens, self.q
        if begun is not None:
            places = columns(token_ids) + begun.num_draft[:, None]
            token_ids, num_draft, q = picked(token_ids, places), num_draft - begun.num_draft, picked(q, places)
        confidence = num_draft * 0.0 + FIRST_CONFIDENCE
        if not self.logits:
            return of_stage(index, token_ids, num_draft, confidence)
        return of_stage(index, token_ids, num_draft, confidence, q, stacked(self.logits))


def _beside(tensor: Any, array: Array) -> Array:
    """A tensor on the side of an array: where that is NumPy's, what the tensor holds is waited for."""
    return tensor.cpu().numpy() if isinstance(array, np.ndarray) else tensor


@dataclass(slots=True)
class Alone:
    """The model stage with this index by itself, token by token. A jump only begins drafts: it needs the target's last
    state."""

    stage: EarlyExit | Jump
    index: int
    counters: StageCounters

    def draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        assert batch.target is not None
        if isinstance(self.stage, Jump) and begun is not None:
            wanted, begun = np.where(begun.num_draft == 0, wanted, 0), None
        num_steps, num_reqs = int(wanted.max(initial=0)), len(wanted)
        if num_steps == 0:
            return nothing(num_reqs, self.stage.max_num_draft)
        start = time.perf_counter()
        behind: tuple[torch.Tensor, ...] = ()
        if begun is not None:
            # Rows that want nothing start at their newest token: behind it no slot is read that was not written.
            lengths, device = np.where(wanted > 0, begun.num_draft, 0), batch.target.num_tokens.device
            fed = begun.token_ids[:, : lengths.max()]
            behind = tuple(torch.as_tensor(part).to(device) for part in (fed, lengths))
        chosen, logits = self.stage.go_on(batch.target, num_steps, *behind)
        token_ids = np.zeros((num_reqs, self.stage.max_num_draft), np.int32)
        token_ids[:, :num_steps] = chosen.cpu().numpy()
        q = None
        if logits is not None:
            q = np.arange(0, num_reqs * num_steps, num_steps)[:, None] + columns(token_ids)
            logits = logits.flatten(0, 1)
        self.counters.asked += int(np.count_nonzero(wanted))
        self.counters.drafted += int(wanted.sum())
        self.counters.ms += (time.perf_counter() - start) * 1000
        return of_stage(self.index, token_ids, wanted, np.full(num_reqs, FIRST_CONFIDENCE), q, logits)


@dataclass(slots=True)
class Verified:
    """`cheap` drafts, the model stage with this index checks it in one pass and extends it."""

    cheap: Drafter
    stage: EarlyExit
    index: int
    counters: StageCounters
    cheap_counters: StageCounters | None = None

    def draft(self, batch: DraftBatch, begun: Drafted | None, wanted: Array) -> Drafted:
        assert batch.target is not None
        self.counters.asked += int(np.count_nonzero(wanted))
        none = nothing(len(wanted), self.stage.max_num_draft)
        start = none if begun is None else begun
        known = Known(start.token_ids, start.num_draft, start.num_draft + wanted, none.stage)
        num_fed = none.num_draft  # the first token that is fed is the newest of the history
        while (missing := known.ends - known.num_tokens).any():
            # The stage's own choice comes behind the guess: one token less is wanted of it.
            guess = self.cheap.draft(batch, known.so_far, np.maximum(missing - 1, 0))
            start_s, num_before = time.perf_counter(), known.num_tokens
            length = int((1 + num_before + guess.num_draft - num_fed)[missing > 0].max())
            num_kept = known.check(self.stage, batch.target, guess, length)
            num_fed = known.num_tokens
            self.counters.drafted += int((num_fed - num_before).sum())
            if self.cheap_counters is not None:
                self.cheap_counters.kept += int(num_kept.sum())
            self.counters.ms += (time.perf_counter() - start_s) * 1000
        return known.own(self.index, begun)
