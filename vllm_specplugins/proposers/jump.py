"""Jump: from the newest token straight to the target's head or last layers, on the target's own paged KV cache.

A trained part (heads/) guesses what would stand in front of a late layer from what the target's last step, or the
last jump, left behind the final norm, and from the newest token after a few early layers, or none. The layers after
run as they are, so one draft token costs their time and the head's. Their keys and values of the text are the
target's; those of a draft go to the reserved slots, and verification overwrites them. So there is no second cache to
fill and nothing to run over a prompt. A jump may also end after the last layer: then the part alone stands between a
token and the head (Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators").
What the state of the last token brings, EAGLE uses in a layer of its own (Li et al. 2024); that the target's cache can
be read from a guessed state is how "economize" jumps. K: num_speculative_tokens.
"""

from typing import Any

import torch

from vllm_specplugins.config import ConfigError, JumpConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.draft_sampler import Chosen, ModelProposer, Sees, Steps
from vllm_specplugins.proposers.heads.jump_head import JumpHead, check_jump
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Target, TargetSizes


class Jump(ModelProposer):
    def __init__(self, config: JumpConfig, context: ProposerContext):
        super().__init__(config, context)
        self._head = JumpHead.load(config.head, context.device, context.dtype or torch.float32)
        if config.learn is not None:
            size = self._head.config.hidden_size
            self.learner = Learner(self._head, config.learn, context, config.head, size)

    def draft_steps(self, target: Target, num_steps: int, sees: Sees | None = None, rates: bool = False) -> Steps:
        """One jump for each token."""
        last, positions, states = target.last_token_ids, target.num_tokens - 1, target.last_hidden_states
        steps = Steps.of(last, num_steps)
        for step in range(num_steps):
            states = self._jump(target, last, states, positions)
            chosen, logits = self._choose(target, states, positions + 1, steps.token_ids[:, :step], sees, rates)
            steps.put(step, *chosen)
            last = chosen.token_ids
            if sees is not None:
                sees(step, logits)
            positions = (positions + 1).clamp_(max=self.max_position)
        return steps

    def _jump(
        self, target: Target, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """States [num_reqs, hidden_size] after the final norm, from those of the tokens before."""
        config, forward = self._head.config, target.forward
        if config.early_layers:
            early = forward.hidden_states(config.early_layers, token_ids, positions, normed=False)
        else:
            early = forward.embeddings(token_ids)
        late: torch.Tensor = forward.hidden_states_of(
            config.late_layer, config.num_layers, self._head.states(early, states), positions
        )
        return late

    def _choose(
        self,
        target: Target,
        states: torch.Tensor,
        positions: torch.Tensor,
        begun: torch.Tensor,
        sees: Sees | None,
        rates: bool,
    ) -> tuple[Chosen, Any]:
        """What follows each token, and all logits, if they had to be made."""
        if self._sampler.is_greedy and target.edit is None and sees is None and not rates:
            return Chosen(target.forward.argmax(states)), None
        logits = target.forward.logits(states)
        return self._sampler.choose(target, logits, positions, begun, rates=rates), logits


def check(config: JumpConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the part is made for the target."""
    head = check_jump(config.head, num_layers=sizes.num_layers, hidden_size=sizes.hidden_size)
    if config.learn is not None and (head.early_layers, head.late_layer) != (0, head.num_layers):
        raise ConfigError(
            "jump: learn must be false for a head with which layers run, not true: early_layers is "
            f"{head.early_layers}, and late_layer {head.late_layer} of {head.num_layers} ({config.head})."
        )
