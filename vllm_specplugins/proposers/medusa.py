"""Medusa: heads on the target's last hidden state draft the next K tokens in one pass, and no layer runs.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Its chain at
temperature 0 is blockwise parallel decoding (Stern et al. 2018, "Blockwise Parallel Decoding for Deep Autoregressive
Models"): head k guesses what stands k + 2 tokens after the state, whatever the tokens between are. K:
num_speculative_tokens.
"""

from collections.abc import Sequence

import torch

from vllm_specplugins.config import MedusaConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads, check_medusa
from vllm_specplugins.target import Target, TargetSizes


class Medusa:
    """Stateless. `propose` waits for nothing, so an adapter may record it in a CUDA graph."""

    def __init__(self, config: MedusaConfig, context: ProposerContext):
        self._heads = MedusaHeads.load(
            config.heads, context.max_num_draft, context.vocab_size, context.device, context.dtype or torch.float32
        )
        self.max_num_draft = context.max_num_draft
        self._sampler = DraftSampler(config.draft_sample_method)

    def propose(self, batch: DraftBatch) -> Draft:
        """A token of each head; a request near the end of its context gets fewer."""
        assert batch.target is not None
        token_ids, logits = self.draft_from(batch.target, int(batch.max_num_draft.max(initial=0)))
        return Draft(token_ids, batch.max_num_draft, logits=logits)

    def draft_from(self, target: Target, num_steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of so many heads; see Jump.draft_from."""
        last = target.last_token_ids
        token_ids = last.new_empty(len(last), num_steps, dtype=torch.int32)
        if num_steps == 0:
            return token_ids, None
        logits = self._heads.logits(target.last_hidden_states, num_steps, target.forward.logits)
        q_logits = None
        for step, own in enumerate(logits):
            token_ids[:, step], q_logits = self._sampler.choose(
                target, own, target.num_tokens + step, token_ids[:, :step]
            )
            if q_logits is not None:
                own.copy_(q_logits)
        return token_ids, None if q_logits is None else logits.transpose(0, 1)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Nothing to keep within it: heads write no keys."""

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


def check(config: MedusaConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless there are K heads that are made for the target."""
    own = {"num_heads": sizes.num_draft, "hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size}
    check_medusa(config.heads, **own)
