"""Implements the policy `verify`: a model stage checks the tokens of a cheaper stage before the target does.

This is staged speculative decoding (Spector and Re 2023; Chen et al. 2023, "Cascade speculative drafting"): the model
stage checks a cheap draft in one forward pass, corrects it and extends it. The resulting tokens are the ones that the
model stage would draft alone. Proof: given the tokens before it, the stage's choice at a position is a function of its
logits and of noise that depends on (seed, position) alone. A cheap token is accepted only if it is that choice, and
otherwise replaced by it. By induction over the positions, every token is the stage's choice, with the stage's q. Two
model stages that share their noise agree about as often as any acceptance rule permits (Daliri et al. 2025, "Coupling
without communication").
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplugins.cascade.on_device import MODEL, DeviceBatch, DeviceModel
from vllm_specplugins.cascade.stage import Source, Stage
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.request_options import allows
from vllm_specplugins.structures.arrays import Ints
from vllm_specplugins.structures.drafts import DraftArrays, columns, either, join, nothing, picked, stacked
from vllm_specplugins.target import Target


class Checked:
    """A source: `stage`, an early exit, checks and extends the drafts of `cheap`."""

    def __init__(self, cheap: Source, stage: Stage):
        self._cheap, self._stage = cheap, stage
        self.index, self.counters = stage.index, stage.counters
        self.method, self.proposer = stage.method, stage.proposer

    def limits(self, batch: DraftBatch, limits: Ints) -> Ints:
        """Returns limits, since any stage that a request allows may draft for it."""
        return limits

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts as Stage.draft does. Requests that do not allow the model stage get the unchecked cheap draft."""
        drafts = self._checked(batch, prefix, self._stage.limits(batch, limits))
        allowed = allows(batch.options, self._stage.name)
        if allowed is None:
            return drafts
        wanted = self._cheap.limits(batch, np.where(allowed, 0, limits))
        return join(drafts, self._cheap.draft(batch, prefix, wanted))

    def _checked(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        assert batch.target is not None
        self.counters.asked += int(np.count_nonzero(limits))
        check = _Check(self.proposer, batch.target, prefix, limits)
        while check.num_missing:
            wanted = self._cheap.limits(batch, np.maximum(check.ends - check.drafts.num_draft - 1, 0))
            guess = self._cheap.draft(batch, check.drafts, wanted)
            start_s = time.perf_counter()
            num_right, num_new = check.run(guess)
            self._cheap.counters.kept += num_right
            self.counters.drafted += num_new
            self.counters.ms += (time.perf_counter() - start_s) * 1000
        drafts = check.drafts if prefix is None else check.drafts.shifted(prefix.num_draft)
        num_tokens = drafts.num_draft if prefix is None else drafts.num_draft - prefix.num_draft
        drafts = nothing(len(limits), drafts.token_ids.shape[1])._replace(
            token_ids=drafts.token_ids, num_draft=num_tokens, q=drafts.q if check.logits else None
        )
        drafts.stage[:] = self.index
        return drafts._replace(logits=stacked(check.logits)) if check.logits else drafts


class _Check:
    """The drafts of a batch while a model stage, an early exit, checks them pass by pass. It drafts at most limits
    [num_reqs] int64 tokens after `prefix`, if any."""

    def __init__(self, model: Any, target: Target, prefix: DraftArrays | None, limits: Ints):
        self._model, self._target, num_reqs = model, target, len(limits)
        none = nothing(num_reqs, model.max_num_draft)
        self.drafts = none._replace(q=np.full_like(none.stage, -1))  # the tokens so far
        if prefix is not None:
            self.drafts.token_ids[:], self.drafts.num_draft[:] = prefix.token_ids, prefix.num_draft
        self.ends: Ints = self.drafts.num_draft + limits
        self.num_missing: int = sum(limits.tolist())
        self.logits: list[Any] = []  # of each pass, if the stage samples: [N, vocab_size]
        self._newest, self._lengths = _array(target.last_token_ids, np.int32), _array(target.num_tokens, np.int64)
        self._is_first = True

    def run(self, guess: DraftArrays) -> tuple[int, int]:
        """Runs one pass: each draft is extended by the guess as far as the model agrees, and by the model's next
        choice. Returns the number of tokens of each guess that the model confirmed, and the number of new tokens."""
        known, token_ids, old_q = self.drafts.num_draft, self.drafts.token_ids, self.drafts.q
        assert old_q is not None
        is_asked, places = known < self.ends, columns(token_ids)
        is_known, num_text = places < known[:, None], known + guess.num_draft
        text = np.where(is_known, token_ids, picked(guess.token_ids, places - known[:, None]))
        # The first pass also reads the prefix. Rows that need fewer tokens than others read known tokens again.
        length = int(np.where(is_asked, (num_text if self._is_first else guess.num_draft) + 1, 0).max())
        starts = np.where(is_asked, (num_text + 1 - length).clip(min=0), 0)
        at = starts[:, None] + np.arange(length)
        fed = np.where(at > 0, picked(text, at - 1), self._newest[:, None])
        positions = np.minimum(self._lengths[:, None] - 1 + at, self._model.max_position)
        chosen, logits = self._model.next_tokens(self._target, fed, positions, text, starts)
        choices = picked(_array(chosen, np.int32), places - starts[:, None])
        num_right = (is_known | ((choices == text) & (places < num_text[:, None]))).cumprod(axis=1).sum(axis=1)
        num_tokens = np.where(is_asked, np.minimum(num_right + 1, self.ends), known)
        is_new = ~is_known & (places < num_tokens[:, None])
        q: Any = sum(map(len, self.logits)) + np.arange(len(known))[:, None] * length + places - starts[:, None]
        self.drafts = self.drafts._replace(
            token_ids=np.where(is_new, choices, token_ids), num_draft=num_tokens, q=np.where(is_new, q, old_q)
        )
        if logits is not None:
            self.logits.append(logits.reshape(-1, logits.shape[-1]))
        num_new = int(is_new.sum())
        self.num_missing, self._is_first = self.num_missing - num_new, False
        return int((num_right - known)[is_asked].sum()), num_new


def _array(tensor: torch.Tensor, dtype: Any) -> Any:
    return np.ascontiguousarray(tensor.cpu().numpy(), dtype)


def checked(stages: Sequence[Stage]) -> Source:
    """Returns the source of the last stage, which checks the drafts of the earlier stages."""
    *cheaper, stage = stages
    return Checked(checked(cheaper), stage) if cheaper else stage


class CheckedOnDevice(DeviceModel):
    """The policy `verify` on the device: the model drafts all tokens, in the same number of steps as without a lookup.
    If it confirms a token of the lookup, that token's acceptance probability rises."""

    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        assert prefix is not None
        limits = limits.clamp(max=batch.num_steps)
        if batch.num_steps == 0:
            return prefix._replace(by_stage=(prefix.num_draft, limits - 1))
        drafts = self.drafts(batch, MODEL, limits)
        is_right = ((drafts.token_ids == prefix.token_ids) & prefix.is_drafted & drafts.is_drafted).int().cumprod(dim=1)
        if batch.rates and self.proposer.is_one_hot:  # the lookup must not affect which drawn tokens are verified
            both_wrong = (1 - drafts.confidence) / prefix.confidence.clamp(min=1) ** 2
            confidence = torch.where(is_right > 0, (1 - both_wrong).clamp(max=1 - 1e-6), drafts.confidence)
            drafts = drafts._replace(confidence=confidence)
        is_asked = limits > 0
        counts = prefix.num_draft, torch.where(is_asked, limits, -1), is_right.sum(dim=1, dtype=torch.int32)
        return either(is_asked, drafts, prefix)._replace(logits=drafts.logits, by_stage=counts)
