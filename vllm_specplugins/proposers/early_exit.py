"""Early exit: the target's own first layers and a head draft, on the target's own paged KV cache.

Self-speculative decoding (Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip"). No second model
and no second KV cache: verification by all layers overwrites what drafting wrote. The head is the target's own final
norm and head, or a trained one. K: num_speculative_tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext, Target
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.exit_head import ExitHead


class EarlyExit:
    """Stateless: whatever it knows of a request stands in the target's KV cache.

    `propose` waits for nothing and branches on nothing that is on the device, so an adapter may record it in a
    CUDA graph.
    """

    def __init__(self, config: EarlyExitConfig, context: ProposerContext):
        self._exit_layer = config.exit_layer
        self._sampler = DraftSampler(config.draft_sample_method)
        self.fit(context.max_model_len)
        self._head = None
        if config.exit_head is not None:
            self._head = ExitHead.load(config.exit_head, context.device, context.dtype)

    def fit(self, max_model_len: int) -> None:
        """No request is longer than this: what would be drafted behind its end is fed at its last position."""
        self._max_position = max_model_len - 1

    def propose(self, batch: DraftBatch) -> Draft:
        """K tokens of the exit, one step each; a request near the end of its context gets fewer."""
        target = batch.target
        assert target is not None
        width = int(batch.max_num_draft.max(initial=0))
        last, positions = target.last_token_ids, target.num_tokens - 1
        token_ids = last.new_empty(batch.num_reqs, width, dtype=torch.int32)
        logits = None
        for step in range(width):
            last, step_logits = self._choose(target, last, positions, token_ids[:, :step])
            token_ids[:, step] = last
            if step_logits is not None:
                if logits is None:
                    logits = step_logits.new_empty(batch.num_reqs, width, step_logits.shape[-1])
                logits[:, step] = step_logits
            positions.add_(1).clamp_(max=self._max_position)
        return Draft(token_ids, batch.max_num_draft, logits=logits)

    def choose(self, target: Target, token_ids: Any, firsts: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feeds several tokens of each request at once; for each, what the exit says comes next.

        Args:
            token_ids: [num_reqs, T] int64 on the host.
            firsts: [num_reqs] int64 on the host: a request's first token stands so far past its newest one.

        Returns:
            token ids [num_reqs, T] and, if the exit is "probabilistic", logits [num_reqs, T, vocab_size]. Each is the
            one that `propose` would draft behind the same tokens.
        """
        device, length = target.num_tokens.device, token_ids.shape[1]
        offsets = torch.from_numpy(firsts[:, None] + np.arange(length)).to(device)
        positions = (target.num_tokens[:, None] - 1 + offsets).clamp_(max=self._max_position)
        return self._choose(target, torch.from_numpy(token_ids).to(device), positions)

    def _choose(
        self, target: Target, token_ids: torch.Tensor, positions: torch.Tensor, begun: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What follows each token: ids and, if it is drawn by itself, logits. Of shape [num_reqs] or [num_reqs, T].

        `begun` [num_reqs, T]: what was drafted before; None: nobody edits the logits.
        """
        hidden_states = target.forward.hidden_states(self._exit_layer, token_ids, positions, normed=self._head is None)
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        if self._sampler.is_greedy and self._head is None and (target.edit is None or begun is None):
            return target.forward.argmax(flat).view(token_ids.shape), None
        logits = (target.forward if self._head is None else self._head).logits(flat)
        chosen, q_logits = self._sampler.choose(target, logits, positions.reshape(-1) + 1, begun)
        return chosen.view(token_ids.shape), None if q_logits is None else q_logits.view(*token_ids.shape, -1)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""
