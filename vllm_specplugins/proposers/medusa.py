"""Medusa: heads on the target's last hidden state draft the next K tokens in one pass, without running a layer.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Its chain at
temperature 0 is blockwise parallel decoding (Stern et al. 2018, "Blockwise Parallel Decoding for Deep Autoregressive
Models"): head k predicts the token k + 2 places after the state, independently of the tokens between. K:
num_speculative_tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_specplugins.config import MedusaConfig
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.proposers.draft_sampler import ModelProposer
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads, check_medusa, num_heads
from vllm_specplugins.target import Target, TargetSizes


class Medusa(ModelProposer):
    def __init__(self, config: MedusaConfig, context: ProposerContext):
        super().__init__(config, context)
        # A stage may have fewer heads than the cascade's K.
        self._num_heads = min(context.max_num_draft, num_heads(config.heads))
        dtype = context.dtype or torch.float32
        self.part = MedusaHeads.load(config.heads, self._num_heads, context.vocab_size, context.device, dtype)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        return self.propose(replace(batch, max_num_draft=batch.max_num_draft.clip(max=self._num_heads)))

    def one_pass(self, target: Target, num_steps: int) -> Sequence[torch.Tensor]:
        return tuple(self.part.logits(target.last_hidden_states, num_steps, target.forward.logits))


def check(config: MedusaConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the folder has enough heads that were trained for the target."""
    check_medusa(config.heads, num_heads=sizes.num_draft, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
