"""Early exit: some of the target's layers and a head draft, on the target's paged KV cache. This is self-speculative
decoding: Zhang et al. 2023, "Draft & Verify", skip layers; Elhoushi et al. 2024, "LayerSkip", run the first layers.
Verification by all layers overwrites the keys and values of drafts. The head is the target's final norm and head, or a
trained head. R: requests, T: tokens of each, V: vocabulary, K: num_speculative_tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplugins.config import ConfigError, EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.proposers.draft_sampler import ModelProposer, Prefix, Steps
from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, check_look_ahead
from vllm_specplugins.target import Target, TargetSizes


class EarlyExit(ModelProposer):
    watch: Any = None  # its `put` receives the tokens of each step, their positions and states; the engine sets it
    _ahead: LookAhead | None = None

    def __init__(self, config: EarlyExitConfig, context: ProposerContext):
        super().__init__(config, context)
        self.layers, dtype = config.drafting_layers, context.dtype or torch.float32
        if config.look_ahead is not None:
            self._ahead = LookAhead.load(config.look_ahead, context.device, dtype)
        self.continues_drafts = self._ahead is None
        if config.exit_head is not None:
            self.part = self.head = ExitHead.load(config.exit_head, context.device, context.dtype)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Also runs a pass over drafts of other stages, as in a cascade."""
        assert batch.target is not None
        longest = np.zeros((batch.num_reqs, int(batch.max_num_draft.max(initial=1))), np.int64)
        self.next_tokens(batch.target, longest, longest, longest, np.zeros(batch.num_reqs, np.int64))
        return self.propose(batch)

    def one_pass(self, target: Target, num_steps: int) -> Sequence[torch.Tensor] | None:
        if self._ahead is None:
            return None
        states = self._ahead.states(target, self.config.exit_layer, num_steps, self.max_position, self.head is None)
        return tuple(self.logits(target, states.flatten(0, 1)).unflatten(0, states.shape[:2]).unbind(1))

    def num_fed(self, num_steps: int) -> int:
        return 1 if self._ahead is None else num_steps

    def continue_steps(self, target: Target, num_steps: int, begun: torch.Tensor, num_begun: torch.Tensor) -> Draft:
        """Reads the first tokens in one pass: at most K - num_steps of them if a request wants num_steps more."""
        rows, first = torch.arange(len(begun), device=begun.device), target.num_tokens - 1
        fed = torch.cat((target.last_token_ids[:, None], begun), dim=1)
        places = first[:, None] + torch.arange(fed.shape[1], device=fed.device)
        states = self._states(target, fed, places.clamp_(max=self.max_position))[rows, num_begun]
        positions, last_slot = first + num_begun, (first + self.max_num_draft - 1).clamp_(max=self.max_position)
        steps, drafts = Steps(target, num_steps), torch.nn.functional.pad(begun, (0, num_steps))
        for step in range(num_steps):
            if step:
                positions = torch.minimum(positions + 1, last_slot)
                states = self._states(target, steps.draft.token_ids[:, step - 1], positions)
            chosen, _ = self.choose(target, states, Prefix(positions + 1, drafts, num_begun + step))
            steps.put(step, chosen)
            drafts[rows, num_begun + step] = chosen.next_ids.to(drafts.dtype)
        return steps.draft

    def run_layers(
        self, target: Target, step: int, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        states = self._states(target, token_ids, positions)
        if self.watch is not None:
            self.watch.put(step, token_ids, positions, states)
        return states

    def _states(self, target: Target, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return target.forward.hidden_states(self.layers, token_ids, positions, normed=self.head is None)

    def next_tokens(
        self, target: Target, token_ids: Any, positions: Any, drafts: Any, num_before: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reads several tokens of each request. Returns the token that `propose` would draft after each of them, [R,
        T], and, if drafts are "probabilistic", logits [R, T, V].

        Args:
            token_ids: [R, T] int.
            positions: [R, T] int64, at most max_position.
            drafts: [R, K] int, the drafts that contain them.
            num_before: [R] int64, the number of draft tokens before the successor of a request's first token.
        """
        device, (num_reqs, length) = target.num_tokens.device, token_ids.shape
        fed, places, drafts, num_before = (
            torch.from_numpy(array).to(device) for array in (token_ids, positions, drafts, num_before)
        )
        counts = (num_before[:, None] + torch.arange(length, device=device)).clamp(max=drafts.shape[1]).flatten()
        states, drafts = self._states(target, fed, places).flatten(0, 1), drafts.repeat_interleave(length, dim=0)
        chosen, _ = self.choose(target, states, Prefix(places.flatten() + 1, drafts, counts))
        logits = None if chosen.q_logits is None else chosen.q_logits.unflatten(0, (num_reqs, length))
        return chosen.next_ids.view(num_reqs, length), logits


def check(config: EarlyExitConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the target has the layers and the parts were trained for them."""
    if config.layers is not None and config.layers[-1] >= sizes.num_layers:
        raise ConfigError(
            f"early_exit: layers must be from 0 to {sizes.num_layers - 1}, the last layer of this model, "
            f"not {config.layers[-1]}."
        )
    if config.exit_layer > sizes.num_layers:
        raise ConfigError(
            f"early_exit: exit_layer must be an integer from 1 to {sizes.num_layers}, the layers of this model, "
            f"not {config.exit_layer}."
        )
    made_for = {"exit_layer": config.exit_layer, "hidden_size": sizes.hidden_size}
    if config.exit_head is not None:
        ExitHead.check(config.exit_head, **made_for, layers=config.layers, vocab_size=sizes.vocab_size)
    if config.look_ahead is not None:
        check_look_ahead(config.look_ahead, **made_for, num_draft=sizes.num_draft)
