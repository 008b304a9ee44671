"""Early exit: the target's own first layers, final norm and head draft, on the target's own paged KV cache.

Self-speculative decoding (Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip"). No second model
and no second KV cache: verification by all layers overwrites what drafting wrote. Greedy: q is one-hot.
"""

from collections.abc import Sequence

import torch

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


class EarlyExit:
    """Stateless: whatever it knows of a request stands in the target's KV cache."""

    def __init__(self, config: EarlyExitConfig, context: ProposerContext):
        self._exit_layer = config.exit_layer
        self._max_position = context.max_model_len - 1

    def propose(self, batch: DraftBatch) -> Draft:
        """K greedy tokens of the exit, one step each; a request near the end of its context gets fewer."""
        target = batch.target
        assert target is not None
        width = int(batch.max_num_draft.max(initial=0))
        token_ids = torch.empty(batch.num_reqs, width, dtype=torch.int32, device=target.last_token_ids.device)
        last = target.last_token_ids
        for step in range(width):
            positions = torch.clamp(target.num_tokens - 1 + step, max=self._max_position)
            hidden_states = target.forward.hidden_states(self._exit_layer, last, positions)
            last = target.forward.logits(hidden_states).argmax(dim=-1).int()
            token_ids[:, step] = last
        return Draft(token_ids, batch.max_num_draft)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""
