"""Combines a lookup with a model or a drafter of vLLM, in tensors on the device. No code here waits for the device or
branches on a tensor's values, so a CUDA graph may record it. The host chooses the number of a model's drafting steps.
R: requests, K: max tokens of a draft."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from vllm_specplugins.cascade.stage import Stage
from vllm_specplugins.config import StageConfig
from vllm_specplugins.draft import Draft, ProposerContext
from vllm_specplugins.kernels.acceptance import Other
from vllm_specplugins.kernels.steps import join
from vllm_specplugins.methods import method_of
from vllm_specplugins.proposers.draft_sampler import LARGEST_PROB, ModelProposer, OnLogits
from vllm_specplugins.stage import StageProposer
from vllm_specplugins.structures.drafts import DraftArrays, of_stage
from vllm_specplugins.target import Target

LOOKUP, MODEL = range(2)  # the stages


class DeviceBatch(NamedTuple):
    """The drafting rows of a step.

    Args:
        slots: [R] int64, the requests' slots.
        num_steps: the number of tokens that a model drafts for each.
        longest: upper bound of a text's length; None while a graph is recorded, which must handle any text.
        rates: whether the caller needs the confidence of tokens.
        on_logits: receives the logits of a model's steps.
        max_lookup: [R] int32, max tokens of a draft that a lookup continues; None: no lookup continues drafts.
    """

    slots: torch.Tensor
    num_steps: int
    target: Target | None = None
    longest: int | None = None
    rates: bool = False
    on_logits: OnLogits | None = None
    max_lookup: torch.Tensor | None = None


class DeviceSource(Protocol):
    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        """Drafts at most limits [R] int32 tokens per row, and returns them joined with `prefix`, an earlier
        draft."""


class DeviceCascade(StageProposer):
    """The proposer that the fault barrier calls for a lookup and a second stage. It has their guards and counters, as
    Cascade has."""

    def __init__(self, configs: Sequence[StageConfig], proposers: Sequence[Any], context: ProposerContext):
        self.stages: list[Stage] = [
            method_of(config.method).stage_kind(index, config, config.method, proposer, context, None)
            for index, (config, proposer) in enumerate(zip(configs, proposers, strict=True))
        ]


class DeviceModel:
    """A model proposer, alone or after a lookup. It continues the lookup's draft if it can read draft tokens; otherwise
    it drafts for requests without a lookup's draft. `tracker` rates drafts by their `worth` on request."""

    def __init__(self, proposer: ModelProposer, tracker: Any = None):
        self.proposer, self._tracker = proposer, tracker

    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        limits = limits.clamp(max=batch.num_steps)
        if prefix is None:
            return self.drafts(batch, 0, limits)
        looked_up, continues = prefix.num_draft, self.proposer.continues_drafts
        if batch.rates:
            # The split uses only what is known before the model draws a token, since it must not depend on the draw.
            other = Other(MODEL, batch.num_steps, continues, limits)
            prefix = prefix.cut(self._tracker.worth(prefix, other, reports=True).num_kept)
        if batch.num_steps == 0:
            return prefix._replace(by_stage=(looked_up, looked_up * 0 - 1))
        steps = self._steps(batch, prefix if continues else None)
        sure = None if steps.confidence is None else steps.confidence.clamp(max=LARGEST_PROB)
        first = prefix.token_ids, prefix.num_draft, prefix.confidence
        second = steps.token_ids, limits, sure
        token_ids, num_draft, stage, confidence, num_second = join(first, second, continues)
        return DraftArrays(token_ids, num_draft, stage, confidence, None, steps.logits, (looked_up, num_second))

    def drafts(self, batch: DeviceBatch, stage: int, limits: torch.Tensor) -> DraftArrays:
        """Returns the model's tokens after each row's newest token."""
        token_ids = limits.new_zeros((len(limits), self.proposer.max_num_draft), dtype=torch.int32)
        drafts = of_stage(stage, token_ids, limits, limits * 0.0 + 1)
        if batch.num_steps == 0:
            return drafts
        steps = self._steps(batch)
        token_ids[:, : batch.num_steps] = steps.token_ids
        if steps.confidence is not None:
            drafts.confidence[:, : batch.num_steps] = steps.confidence.clamp(max=LARGEST_PROB)
        return drafts._replace(logits=steps.logits)

    def _steps(self, batch: DeviceBatch, prefix: DraftArrays | None = None) -> Draft:
        """Runs the model token by token, after each row's newest token or after the tokens of a prefix."""
        assert batch.target is not None
        followed = None if prefix is None else (prefix.token_ids, prefix.num_draft)
        return self.proposer.draft_steps(batch.target, batch.num_steps, batch.on_logits, batch.rates, followed)
