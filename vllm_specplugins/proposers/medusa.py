"""Medusa: heads on the target's last hidden state draft the next K tokens in one pass, and no layer runs.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Its chain at
temperature 0 is blockwise parallel decoding (Stern et al. 2018, "Blockwise Parallel Decoding for Deep Autoregressive
Models"): head k guesses what stands k + 2 tokens after the state, whatever the tokens between are. K:
num_speculative_tokens.
"""

from dataclasses import replace

import torch

from vllm_specplugins.config import MedusaConfig, chain_length
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.proposers.draft_sampler import ModelProposer, Sees, Steps
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads, check_medusa, num_heads
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Target, TargetSizes


class Medusa(ModelProposer):
    def __init__(self, config: MedusaConfig, context: ProposerContext):
        super().__init__(config, context)
        # As a stage it may draft fewer tokens than the cascade.
        self._most = min(_num_heads(config, context.max_num_draft), num_heads(config.heads))
        self._heads = MedusaHeads.load(
            config.heads, self._most, context.vocab_size, context.device, context.dtype or torch.float32
        )
        if config.learn is not None:
            size, own = self._heads.layers[0].shape[-1], replace(context, max_num_draft=self._most)
            self.learner = Learner(self._heads, config.learn, own, config.heads, size)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """See ModelProposer.dummy_run."""
        return self.propose(replace(batch, max_num_draft=batch.max_num_draft.clip(max=self._most)))

    def draft_steps(self, target: Target, num_steps: int, sees: Sees | None = None, rates: bool = False) -> Steps:
        """A token of each head."""
        steps = Steps.of(target.last_token_ids, num_steps)
        logits = self._heads.logits(target.last_hidden_states, num_steps, target.forward.logits) if num_steps else ()
        for step, own in enumerate(logits):
            begun = steps.token_ids[:, :step]
            steps.put(step, *self._sampler.choose(target, own, target.num_tokens + step, begun, rates=rates))
            if sees is not None:
                sees(step, own)
        return steps


def _num_heads(config: MedusaConfig, max_num_draft: int) -> int:
    """A token of a chain each."""
    return chain_length(config.tree) if config.tree else max_num_draft


def check(config: MedusaConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless there are as many heads as draft, made for the target."""
    own = {
        "num_heads": _num_heads(config, sizes.num_draft),
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
    }
    check_medusa(config.heads, **own)
