"""A proposer built into the engine, as a stage of a cascade.

The engine runs it at every step, before the cascade is asked: it must see every token, so that its KV cache stays in
step, and its cost is paid whether its draft is used or not. Its draft tokens arrive with the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.config import BuiltInConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext, StageCounters
from vllm_specplugins.proposers.drafters import DraftToken, Rows
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE


class BuiltIn:
    """The engine keeps all that it knows of requests."""

    def __init__(self, config: BuiltInConfig, context: ProposerContext):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        """The engine's own draft, in the lengths that are wanted."""
        if batch.offer is None:
            return Draft.empty(batch.num_reqs)
        return Draft(batch.offer.token_ids, np.minimum(batch.max_num_draft, batch.offer.token_ids.shape[1]))

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: the engine tells its own proposer."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class Offered:
    """The drafter of a `BuiltIn`, the stage with this index."""

    index: int
    counters: StageCounters

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        """Begins a draft, or continues one that begins as its own does; anything else it has not thought about."""
        if batch.offer is None:
            return [[] for _ in wanted]
        rows: Rows = []
        self.counters.asked += sum(1 for limit in wanted if limit)
        for tokens, own, limit in zip(begun, batch.offer.token_ids.tolist(), wanted, strict=True):
            start = len(tokens)
            agrees = [token.token_id for token in tokens] == own[:start]
            end = start + limit if agrees else start
            rows.append([DraftToken(token_id, self.index, FIRST_CONFIDENCE) for token_id in own[start:end]])
            self.counters.drafted += len(rows[-1])
        return rows
