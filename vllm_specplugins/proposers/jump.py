"""Jump: drafting goes from the newest token straight to the target's head or last layers, on the target's paged KV
cache. A trained part (heads/jump_head.py) predicts the state before a late layer. It reads the state after the final
norm from the target's last step or the last jump, and the newest token's state after a few early layers, or its
embedding. The later layers run unchanged; a jump past the last layer runs none (Wertheimer et al. 2024, "Accelerating
Production LLMs with Combined Token/Embedding Speculators"). Verification overwrites a draft's keys and values, so a
prompt needs no extra pass. EAGLE (Li et al. 2024) uses the last token's state in a layer of its draft model.
"""

import torch

from vllm_specplugins.config import JumpConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.draft_sampler import ModelProposer
from vllm_specplugins.proposers.heads.jump_head import JumpHead, check_jump
from vllm_specplugins.target import Target, TargetSizes


class Jump(ModelProposer):
    def __init__(self, config: JumpConfig, context: ProposerContext):
        super().__init__(config, context)
        self.part = JumpHead.load(config.head, context.device, context.dtype or torch.float32)

    def run_layers(
        self, target: Target, step: int, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        config, forward = self.part.config, target.forward
        if config.early_layers:
            early = forward.hidden_states(config.early_layers, token_ids, positions, normed=False)
        else:
            early = forward.embeddings(token_ids)
        return forward.hidden_states_of(
            config.late_layer, config.num_layers, self.part.states(early, states), positions
        )


def check(config: JumpConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the part was trained for the target."""
    check_jump(config.head, num_layers=sizes.num_layers, hidden_size=sizes.hidden_size)
