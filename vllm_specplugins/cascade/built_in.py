"""A drafter built into vLLM (EAGLE, a draft model, ...), as a stage of a cascade.

The engine runs it at every step, before the cascade is asked: it must see every token, so that its KV cache stays in
step, and its cost is paid whether its draft is used or not. Its draft tokens arrive with the batch, and with them the
acceptance probability of each, where it says so.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import BuiltInConfig
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE
from vllm_specplugins.structures.draft_arrays import (
    Array,
    DraftArrays,
    columns,
    either,
    namespace,
    nothing,
    of_stage,
    picked,
)


class BuiltIn(Proposer):
    """The engine keeps all that it knows of requests."""

    def __init__(self, config: BuiltInConfig, context: ProposerContext):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        """The engine's own draft, in the lengths that are wanted."""
        if batch.offer is None:
            return Draft.empty(batch.num_reqs)
        return Draft(batch.offer.token_ids, np.minimum(batch.max_num_draft, batch.offer.token_ids.shape[1]))


@dataclass(slots=True)
class BuiltInDrafter:
    """The drafter of a `BuiltIn`, the stage with this index."""

    index: int
    counters: StageCounters
    max_num_draft: int  # K

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        """Begins a draft, or continues one that begins as its own does; anything else it has not thought about."""
        if batch.offer is None:
            return nothing(len(max_draft), self.max_num_draft)
        self.counters.asked += int(np.count_nonzero(max_draft))
        offered = batch.offer.token_ids.shape[1]  # fewer than K in a step for which the engine wants fewer
        rest = (0, 0), (0, self.max_num_draft - offered)
        own, confidence = np.pad(batch.offer.token_ids, rest), None
        if batch.offer.accept_probs is not None:
            confidence = np.pad(confidence_of(batch.offer.accept_probs), rest)
        num_draft = np.minimum(max_draft, offered)
        if prefix is not None:
            places, starts = columns(own), prefix.num_draft[:, None]
            agrees = ((own == prefix.token_ids) | (places >= starts)).all(axis=1)
            own, num_draft = picked(own, places + starts), np.where(agrees, max_draft, 0)
            confidence = None if confidence is None else picked(confidence, places + starts)
            num_draft = np.minimum(num_draft, np.maximum(offered - prefix.num_draft, 0))
        self.counters.drafted += int(num_draft.sum())
        drafts = of_stage(self.index, own, num_draft, np.full(len(max_draft), FIRST_CONFIDENCE))
        return drafts if confidence is None else drafts._replace(confidence=confidence)


def better(found: DraftArrays, offered: DraftArrays, gains: tuple[Array, Array] | None) -> DraftArrays:
    """Of each row a lookup's draft or a drafter's own: the one that gains more, [R] each, or without gains the first
    one if there is any. Where both say the same as far as the shorter one goes, both: each drafter's token is its own.

    >>> found, offered = (of_stage(i, np.array([[5, 6, 7]]), np.array([3 - i]), np.ones(1)) for i in (0, 1))
    >>> joined = better(found, offered, None)
    >>> joined.num_draft.tolist(), joined.stage.tolist()
    ([3], [[1, 1, 0]])
    """
    is_theirs, is_found = offered.is_drafted, found.is_drafted
    both = is_theirs & is_found
    is_same = ((found.token_ids == offered.token_ids) | ~both).all(1)[:, None]
    is_first = found.num_draft > 0 if gains is None else gains[0] >= gains[1]
    chosen = either(is_first, found, offered)
    longer = either(found.num_draft >= offered.num_draft, found, offered)
    joined = either(is_same[:, 0], longer, chosen)
    where = namespace(is_same).where
    stage, confidence = (
        where(is_same & is_theirs, getattr(offered, name), getattr(joined, name)) for name in ("stage", "confidence")
    )
    return joined._replace(stage=stage, confidence=confidence)


def confidence_of(accept_probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """A drafter's own acceptance probabilities, in the unit of an exit's confidence.

    >>> confidence_of(np.array([0.0, 0.75, 1.0], np.float32)).round().tolist()
    [1.0, 2.0, 1000.0]
    """
    return (1 - accept_probs.clip(0, 1 - 1e-6).astype(np.float64)) ** -0.5
