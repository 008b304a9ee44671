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

from collections.abc import Sequence

import torch

from vllm_specplugins.config import JumpConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.heads.jump_head import JumpHead, check_jump
from vllm_specplugins.target import Target, TargetSizes


class Jump:
    """Stateless. `propose` waits for nothing, so an adapter may record it in a CUDA graph."""

    def __init__(self, config: JumpConfig, context: ProposerContext):
        self.max_num_draft = context.max_num_draft
        self._head = JumpHead.load(config.head, context.device, context.dtype or torch.float32)
        self._sampler = DraftSampler(config.draft_sample_method)
        self.set_max_model_len(context.max_model_len)

    def set_max_model_len(self, max_model_len: int) -> None:
        """See EarlyExit.set_max_model_len."""
        self._max_position = max_model_len - 1

    def propose(self, batch: DraftBatch) -> Draft:
        """K tokens, one jump each; a request near the end of its context gets fewer."""
        assert batch.target is not None
        token_ids, logits = self.draft_from(batch.target, int(batch.max_num_draft.max(initial=0)))
        return Draft(token_ids, batch.max_num_draft, logits=logits)

    def draft_from(self, target: Target, num_steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids [num_reqs, num_steps] int32 and, if drawn by themselves, their logits, with the vocabulary last."""
        last, positions, states = target.last_token_ids, target.num_tokens - 1, target.last_hidden_states
        token_ids = last.new_empty(len(last), num_steps, dtype=torch.int32)
        all_logits = []
        for step in range(num_steps):
            states = self._jump(target, last, states, positions)
            last, logits = self._choose(target, states, positions + 1, token_ids[:, :step])
            token_ids[:, step] = last
            if logits is not None:
                all_logits.append(logits)
            positions = (positions + 1).clamp_(max=self._max_position)
        return token_ids, torch.stack(all_logits, dim=1) if all_logits else None

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
        self, target: Target, states: torch.Tensor, positions: torch.Tensor, begun: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What follows each token: ids [num_reqs] and, if it is drawn by itself, logits."""
        if self._sampler.is_greedy and target.edit is None:
            return target.forward.argmax(states), None
        return self._sampler.choose(target, target.forward.logits(states), positions, begun)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


def check(config: JumpConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the part is made for the target."""
    check_jump(config.head, num_layers=sizes.num_layers, hidden_size=sizes.hidden_size)
