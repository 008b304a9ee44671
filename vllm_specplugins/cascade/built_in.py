"""Makes a drafter built into vLLM (EAGLE, a draft model, ...) a stage of a cascade."""

from functools import cached_property
from typing import Any

import numpy as np

from vllm_specplugins.cascade.stage import Stage
from vllm_specplugins.config.built_in import BuiltInConfig
from vllm_specplugins.draft import DraftBatch, Offer, ProposerContext
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.stage import StageProposer
from vllm_specplugins.structures.arrays import Ints
from vllm_specplugins.structures.drafts import FIRST_CONFIDENCE, DraftArrays, columns, nothing, of_stage


class BuiltIn(StageProposer):
    """Passes on the drafts of the engine's drafter. The engine runs that drafter in every step before the cascade,
    since the drafter's KV cache must contain all tokens. The batch contains its drafts, and acceptance probabilities if
    the drafter computes them."""

    share = 1.0  # share of the passes after the first one that this step runs

    def __init__(self, config: BuiltInConfig, context: ProposerContext):
        self._max_num_draft = context.max_num_draft
        self._all_ms = self._first_ms = 0.0  # ms of all passes in a step, and of the first pass

    def took(self, offer: Offer) -> float:
        """Records the time of this drafting, in ms, unless it includes a prompt."""
        if offer.has_prompt:
            pass
        elif self.share == 1:
            self._all_ms = offer.ms
        else:
            self._first_ms += offer.ms - (self._all_ms - self.spared_ms)
        return offer.ms

    @property
    def saved_ms(self) -> float:
        """Returns the time in ms that a step saves if the stage drafts nothing."""
        return max(0.0, self._all_ms - self._first_ms)

    @property
    def spared_ms(self) -> float:
        """Returns the time in ms that this step saved."""
        return (1 - self.share) * self.saved_ms

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts as Stage.draft does; it continues a prefix only if its draft begins with it."""
        assert batch.offer is not None
        offer = batch.offer.draft
        num_reqs, num_offered = offer.token_ids.shape  # fewer than K if the engine wants fewer in this step
        rest = (0, 0), (0, self._max_num_draft - num_offered)
        confidence = np.full(num_reqs, FIRST_CONFIDENCE)
        if offer.confidence is not None:
            confidence = np.pad(offer.confidence.clip(0, 1 - 1e-6).astype(np.float64), rest)
        drafts = of_stage(0, np.pad(offer.token_ids, rest), np.minimum(limits, num_offered), confidence)
        if prefix is None:
            return drafts
        starts, token_ids = prefix.num_draft, drafts.token_ids
        agrees = ((token_ids == prefix.token_ids) | (columns(token_ids) >= starts[:, None])).all(axis=1)
        num_draft = np.where(agrees, np.minimum(limits, np.maximum(num_offered - starts, 0)), 0)
        return drafts.shifted(starts).cut(num_draft)


class OfferedStage(Stage):
    """The stage of such a drafter. Every rank runs the drafter in the engine's thread, and the cascade counts its
    time."""

    @cached_property
    def guard(self) -> Guard:
        on_all_ranks = self._context.num_ranks > 1
        budget_ms = None if on_all_ranks else self._context.time_budget_ms
        return self._new_guard(budget_ms, ends_process=on_all_ranks)

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        if batch.offer is None:
            return nothing(len(limits), self._context.max_num_draft)
        return self._counted(self.proposer.draft(batch, prefix, limits), limits)


def offered_of(cascade: Any) -> OfferedStage | None:
    """Returns the stage of a cascade, on the host or on the device, that is built into vLLM."""
    return next((stage for stage in cascade.stages if isinstance(stage, OfferedStage)), None)


def guard_of(cascade: Any) -> Guard:
    """Returns the guard by which the engine calls the drafter of a cascade."""
    stage = offered_of(cascade)
    assert stage is not None
    return stage.guard
