"""Early exit: the target's own first layers and a head draft, on the target's own paged KV cache.

Self-speculative decoding (Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip"). No second model
and no second KV cache: verification by all layers overwrites what drafting wrote. The head is the target's own final
norm and head, or a trained one. K: num_speculative_tokens.
"""

from collections.abc import Sequence

import torch

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext, Target
from vllm_specplugins.kernels.gumbel.reference import gumbel_sample
from vllm_specplugins.proposers.exit_head import ExitHead


class EarlyExit:
    """Stateless: whatever it knows of a request stands in the target's KV cache.

    `propose` waits for nothing and branches on nothing that is on the device, so an adapter may record it in a
    CUDA graph.
    """

    def __init__(self, config: EarlyExitConfig, context: ProposerContext):
        self._exit_layer = config.exit_layer
        self._samples = config.draft_sample_method == "probabilistic"
        self._max_position = context.max_model_len - 1
        self._head = None
        if config.exit_head is not None:
            self._head = ExitHead.load(config.exit_head, context.device, context.dtype)

    def propose(self, batch: DraftBatch) -> Draft:
        """K tokens of the exit, one step each; a request near the end of its context gets fewer."""
        target = batch.target
        assert target is not None
        width = int(batch.max_num_draft.max(initial=0))
        last, positions = target.last_token_ids, target.num_tokens - 1
        token_ids = last.new_empty(batch.num_reqs, width, dtype=torch.int32)
        logits = None
        for step in range(width):
            hidden_states = target.forward.hidden_states(self._exit_layer, last, positions, normed=self._head is None)
            positions.add_(1).clamp_(max=self._max_position)
            if self._samples:
                step_logits = self._logits(target, hidden_states)
                if logits is None:
                    logits = step_logits.new_empty(batch.num_reqs, width, step_logits.shape[-1])
                logits[:, step] = step_logits
                last = gumbel_sample(step_logits, target.sampling.temperature, target.sampling.seeds, positions)
            elif self._head is None:
                last = target.forward.argmax(hidden_states)
            else:
                last = self._head.logits(hidden_states).argmax(dim=-1)
            token_ids[:, step] = last
        return Draft(token_ids, batch.max_num_draft, logits=logits)

    def _logits(self, target: Target, hidden_states: torch.Tensor) -> torch.Tensor:
        head = target.forward if self._head is None else self._head
        logits: torch.Tensor = head.logits(hidden_states)
        return logits

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""
