"""Token recycling: what the target last found likeliest behind a token, and behind that, and so on.

It reads the newest token, and what verification has found anyway: `DraftBatch.likeliest`. Luo et al., "Turning Trash
into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (2024), who keep several candidates
and verify a tree; this keeps one, and drafts a chain. A tenant's tokens are drafted for that tenant alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.config import ConfigError, TokenRecyclingConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Likeliest, ProposerContext
from vllm_specplugins.proposers.drafted import NO_COUNTS, NO_TOKENS
from vllm_specplugins.structures.recycled import NO_TABLE, RecycledTokens

Ints = npt.NDArray[np.int64]


class TokenRecycling:
    """See the module. Nothing is kept of a request.

    Request options: `learn`, whether others get drafts from what is found for it; `tenant`, as of suffix lookup.
    """

    def __init__(self, config: TokenRecyclingConfig, context: ProposerContext):
        try:
            self._tokens = RecycledTokens(config.max_table_bytes, context.vocab_size)
        except ValueError as error:
            raise ConfigError(f"token_recycling: {error}") from None
        self._max_num_draft = context.max_num_draft
        self._taken_in: Likeliest | None = None

    def propose(self, batch: DraftBatch) -> Draft:
        """What follows each request's newest token."""
        wanted = batch.max_num_draft.astype(np.int64)
        token_ids, num_draft, times = self.continue_drafts(batch, NO_TOKENS, NO_COUNTS, wanted)
        return Draft(token_ids, num_draft.astype(np.int32), confidence=times.astype(np.float32))

    def continue_drafts(
        self, batch: DraftBatch, begun: Int32Array, num_begun: Ints, wanted: Ints
    ) -> tuple[Int32Array, Ints, npt.NDArray[np.float64]]:
        """What follows each request's history and a draft that was begun. See PromptLookup."""
        tables = self._tokens.of([_tenant(options) for options in batch.options])
        likeliest = batch.likeliest
        if likeliest is not None and likeliest is not self._taken_in:  # a stage is asked more than once in a step
            self._taken_in = likeliest
            learns = np.array([options.get("learn", True) is True for options in batch.options], bool)
            own = np.where(learns, tables, NO_TABLE)[likeliest.requests]
            self._tokens.learn(own, likeliest.token_ids, likeliest.next_ids)
        newest = np.array([text[-1] for text in batch.token_ids], np.int32)
        if len(num_begun):
            last = begun[np.arange(batch.num_reqs), np.maximum(num_begun - 1, 0)]
            newest = np.where(num_begun > 0, last, newest)
        return self._tokens.follow(tables, newest, wanted, self._max_num_draft)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: what the target found comes with the batch."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""

    def reset_store(self) -> None:
        """Forgets all that was found, for all tenants."""
        self._tokens.clear()

    def num_bytes(self) -> int:
        """Memory of all tables."""
        return self._tokens.num_bytes


def _tenant(options: Mapping[str, Any]) -> bytes:
    tenant = options.get("tenant", b"")
    return tenant if isinstance(tenant, bytes) else b""
