"""A drafter built into vLLM (EAGLE, a draft model, ...), as a stage of a cascade.

The engine runs it at every step, before the cascade is asked: it must see every token, so that its KV cache stays in
step, and its cost is paid whether its draft is used or not. Its draft tokens arrive with the batch, and with them the
acceptance probability of each, where it says so.
"""

import numpy as np

from vllm_specplugins.config import BuiltInConfig
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Offer, Proposer, ProposerContext
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.structures.arrays import (
    FIRST_CONFIDENCE,
    Array,
    DraftArrays,
    Floats,
    Ints,
    columns,
    either,
    namespace,
    picked,
)


class BuiltIn(Proposer):
    """The engine keeps all that it knows of requests."""

    is_needed = True  # whether anybody may use what it drafts in this step

    def __init__(self, config: BuiltInConfig, context: ProposerContext):
        self._max_num_draft = context.max_num_draft
        self._ms = {True: 0.0, False: 0.0}  # of the last step in which it was needed, or was not

    def took(self, offer: Offer) -> float:
        """Notes how many ms it took to draft this."""
        self._ms[self.is_needed] = offer.ms
        return offer.ms

    @property
    def saved_ms(self) -> float:
        """The time that a step takes less where the stage drafts nothing."""
        return max(0.0, self._ms[True] - self._ms[False])

    @property
    def spared_ms(self) -> float:
        """The time that this step took less."""
        return 0.0 if self.is_needed else self.saved_ms

    def propose(self, batch: DraftBatch) -> Draft:
        """The engine's own draft, in the lengths that are wanted."""
        if batch.offer is None:
            return Draft.empty(batch.num_reqs)
        return Draft(batch.offer.token_ids, np.minimum(batch.max_num_draft, batch.offer.token_ids.shape[1]))

    def continue_drafts(
        self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, max_draft: Ints
    ) -> tuple[Int32Array, Ints, Floats]:
        """As of a lookup, but of a draft that begins as its own does; anything else it has not thought about."""
        offer = batch.offer
        assert offer is not None
        offered = offer.token_ids.shape[1]  # fewer than K in a step for which the engine wants fewer
        rest = (0, 0), (0, self._max_num_draft - offered)
        own, num_draft = np.pad(offer.token_ids, rest), np.minimum(max_draft, offered)
        confidence = np.full(len(own), FIRST_CONFIDENCE)
        if offer.accept_probs is not None:
            confidence = np.pad(offer.accept_probs.clip(0, 1 - 1e-6).astype(np.float64), rest)
        if len(num_begun):
            places, starts = columns(own), num_begun[:, None]
            agrees = ((own == prefix) | (places >= starts)).all(axis=1)
            num_draft = np.where(agrees, np.minimum(max_draft, np.maximum(offered - num_begun, 0)), 0)
            own = picked(own, places + starts)
            if offer.accept_probs is not None:
                confidence = picked(confidence, places + starts)
        return own, num_draft, confidence


def guard_of(proposer: Proposer, name: str, counters: StageCounters, context: ProposerContext) -> Guard:
    """Of a stage that runs on the host, or is built into the engine, which runs it on every rank in its own thread."""
    index, _, method = name.partition(" ")
    is_built_in, budget_ms = isinstance(proposer, BuiltIn), context.time_budget_ms
    on_all_ranks = is_built_in and context.num_ranks > 1
    return Guard(
        proposer,
        f"Stage {index} ({method})",
        counters,
        None if on_all_ranks else budget_ms,
        in_thread=not is_built_in and budget_ms is not None,
        ends_process=on_all_ranks,
    )


def better(found: DraftArrays, offered: DraftArrays, gains: tuple[Array, Array] | None) -> DraftArrays:
    """Of each row a lookup's draft or a drafter's own: the one that gains more, [R] each, or without gains the first
    one if there is any. Where both say the same as far as the shorter one goes, both: each drafter's token is its own.

    >>> from vllm_specplugins.structures.arrays import of_stage
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
