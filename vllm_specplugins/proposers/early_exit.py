"""Early exit: the target's own first layers and a head draft, on the target's own paged KV cache.

Self-speculative decoding (Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip"). No second model
and no second KV cache: verification by all layers overwrites what drafting wrote. The head is the target's own final
norm and head, or a trained one. K: num_speculative_tokens.
"""

from typing import Any

import numpy as np
import torch

from vllm_specplugins.config import ConfigError, EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.proposers.draft_sampler import Chosen, ModelProposer, Sees, Steps
from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, check_look_ahead
from vllm_specplugins.proposers.learning.exits import ExitStates
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.target import Target, TargetSizes


class EarlyExit(ModelProposer):
    """See the module: whatever it knows of a request stands in the target's KV cache."""

    _read: ExitStates | None = None  # where it learns
    _newest: Any = None  # states that were chosen from last

    def __init__(self, config: EarlyExitConfig, context: ProposerContext):
        super().__init__(config, context)
        self._ahead = None
        if config.look_ahead is not None:
            dtype = context.dtype or torch.float32
            self._ahead = LookAhead.load(config.look_ahead, context.device, dtype).embeddings.weight
        self.continues_drafts = self._ahead is None  # one pass is of what comes after the newest token
        self._head = None
        if config.exit_head is not None:
            self._head = ExitHead.load(config.exit_head, context.device, context.dtype)
        self.exit_layer = config.exit_layer
        if config.learn is not None:
            assert self._head is not None and config.exit_head is not None
            size, rows = self._head.config.hidden_size, context.max_num_reqs
            dtype = context.dtype or torch.float32
            self._read = ExitStates(rows, context.max_num_draft, size, context.device, dtype)
            self.learner = Learner(self._head, config.learn, context, config.exit_head, size, self._read)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """See ModelProposer.dummy_run; in a cascade it is fed drafts of others."""
        assert batch.target is not None
        longest = np.zeros((batch.num_reqs, int(batch.max_num_draft.max(initial=1))), np.int64)
        self.next_tokens(batch.target, longest, longest, longest, np.zeros(batch.num_reqs, np.int64))
        return self.propose(batch)

    def draft_from(
        self, target: Target, num_steps: int, begun: Any = None, num_begun: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the exit drafts after each request's newest token, or after a draft that was begun, one step each.

        Args:
            begun: [num_reqs, T] int tensor, such drafts, all of whose tokens are fed at once.
            num_begun: [num_reqs] int64 tensor, how long each is; at most K - num_steps where that many are needed.

        Returns:
            token ids [num_reqs, num_steps] int32 and, if the exit is "probabilistic", logits [num_reqs, num_steps,
            vocab_size].
        """
        if begun is None:
            return super().draft_from(target, num_steps)
        last, positions = target.last_token_ids, target.num_tokens - 1
        ends = positions + (self.max_num_draft - 1)  # where the last reserved slot is
        steps, text = Steps.of(last, num_steps), torch.nn.functional.pad(begun, (0, num_steps))
        for step in range(num_steps):
            if step == 0:
                last, q_logits = self._choose_behind(target, positions, begun, num_begun)
                positions += num_begun
            else:
                ends_at = torch.minimum(positions, ends)
                (last, q_logits, _), _ = self._choose(target, last, ends_at, text, num_begun + step)
            steps.put(step, last, q_logits)
            text.scatter_(1, (num_begun + step).clamp(max=text.shape[1] - 1)[:, None], last[:, None].to(text.dtype))
            positions.add_(1).clamp_(max=self.max_position)
        return steps.token_ids, steps.logits

    def draft_steps(
        self,
        target: Target,
        num_steps: int,
        sees: Sees | None = None,
        rates: bool = False,
        followed: Any = None,
        num_followed: Any = None,
    ) -> Steps:
        """What the exit says next after each request's newest token, and then after each token of a draft that it
        follows, or else after its own: one token after the other.

        Args:
            sees: is shown each step's logits [num_reqs, vocab_size].
            rates: whether to find each step's largest probabilities.
            followed: [num_reqs, >= num_steps] int tensor, drafts; None: it follows its own tokens alone.
            num_followed: [num_reqs] int tensor, how many of each.
        """
        if self._ahead is not None:
            return self._look_ahead(target, self._ahead, num_steps, sees, rates)
        last, positions = target.last_token_ids, target.num_tokens - 1
        steps = Steps.of(last, num_steps)
        path = steps.token_ids if followed is None else torch.empty_like(steps.token_ids)
        for step in range(num_steps):
            begun, needs_logits = path[:, :step], sees is not None
            chosen, logits = self._choose(target, last, positions, begun, rates=rates, needs_logits=needs_logits)
            if self._read is not None:
                self._read.put(step, last, positions, self._newest)
            steps.put(step, *chosen)
            if sees is not None:
                assert logits is not None
                sees(step, logits)
            last = chosen.token_ids
            if followed is not None:
                last = path[:, step] = torch.where(num_followed > step, followed[:, step], last)
            positions.add_(1).clamp_(max=self.max_position)
        return steps

    def _look_ahead(self, target: Target, ahead: torch.Tensor, num_steps: int, sees: Sees | None, rates: bool) -> Steps:
        """As `draft_steps`, by one pass: after the newest token stand embeddings for those that are not known yet."""
        forward, num_reqs = target.forward, len(target.last_token_ids)
        steps = Steps.of(target.last_token_ids, num_steps)
        if num_steps == 0:
            return steps
        newest = forward.embeddings(target.last_token_ids)[:, None]
        fed = torch.cat((newest, ahead[: num_steps - 1].expand(num_reqs, -1, -1)), dim=1)
        positions = (target.num_tokens - 1)[:, None] + torch.arange(num_steps, device=fed.device)
        positions.clamp_(max=self.max_position)
        states = forward.hidden_states_of(0, self.exit_layer, fed, positions, normed=self._head is None)
        logits = (forward if self._head is None else self._head).logits(states.flatten(0, 1))
        logits = logits.view(num_reqs, num_steps, -1)
        for step in range(num_steps):
            begun, places = steps.token_ids[:, :step], positions[:, step] + 1
            steps.put(step, *self._sampler.choose(target, logits[:, step], places, begun, rates=rates))
            if sees is not None:
                sees(step, logits[:, step])
        return steps

    def _choose_behind(
        self, target: Target, positions: torch.Tensor, begun: torch.Tensor, num_begun: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What follows drafts that were begun after these positions, and their logits: one token of each request."""
        fed = torch.cat((target.last_token_ids[:, None], begun), dim=1)
        places = positions[:, None] + torch.arange(fed.shape[1], device=fed.device)
        firsts = torch.zeros_like(num_begun)
        (chosen, logits, _), _ = self._choose(target, fed, places.clamp_(max=self.max_position), begun, firsts)
        ends = num_begun.clamp(max=begun.shape[1])
        if logits is not None:
            logits = logits[torch.arange(len(fed), device=fed.device), ends]
        return chosen.gather(1, ends[:, None])[:, 0], logits

    def next_tokens(
        self, target: Target, token_ids: Any, positions: Any, text: Any, firsts: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feeds several tokens of each request at once; for each, what the exit says comes next. All are arrays.

        Args:
            token_ids: [num_reqs, T] int.
            positions: [num_reqs, T] int64, where they stand, at most max_position.
            text: [num_reqs, K] int, the drafts that they stand in.
            firsts: [num_reqs] int64, how much of these stands before what follows a request's first token.

        Returns:
            token ids [num_reqs, T] and, if the exit is "probabilistic", logits [num_reqs, T, vocab_size]. Each is the
            one that `propose` would draft behind the same tokens.
        """
        device = target.num_tokens.device
        fed, places, begun, firsts = (torch.from_numpy(own).to(device) for own in (token_ids, positions, text, firsts))
        return self._choose(target, fed, places, begun, firsts)[0][:2]

    def _choose(
        self,
        target: Target,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        begun: torch.Tensor | None = None,
        firsts: torch.Tensor | None = None,
        rates: bool = False,
        needs_logits: bool = False,
    ) -> tuple[Chosen, torch.Tensor | None]:
        """What follows each token, of shape [num_reqs] or [num_reqs, T], and all logits [N, vocab_size] if they had to
        be made, or are needed.

        `begun` [num_reqs, K]: what was drafted before; None: nobody edits the logits. `firsts` [num_reqs]: how
        much of that stands before what follows each request's first token; None: all.
        """
        hidden_states = target.forward.hidden_states(self.exit_layer, token_ids, positions, normed=self._head is None)
        flat = self._newest = hidden_states.view(-1, hidden_states.shape[-1])
        is_plain = self._sampler.is_greedy and self._head is None and (target.edit is None or begun is None)
        if is_plain and not (rates or needs_logits):
            return Chosen(target.forward.argmax(flat).view(token_ids.shape)), None
        logits = (target.forward if self._head is None else self._head).logits(flat)
        counts, num_fed = None, len(flat) // len(token_ids)
        if begun is not None and firsts is not None and target.edit is not None:
            counts = (firsts[:, None] + torch.arange(num_fed, device=flat.device)).clamp(max=begun.shape[1]).flatten()
            begun = begun.repeat_interleave(num_fed, dim=0)
        places = positions.reshape(-1) + 1
        chosen, q_logits, largest_probs = self._sampler.choose(target, logits, places, begun, counts, rates)
        q_logits = None if q_logits is None else q_logits.view(*token_ids.shape, -1)
        return Chosen(chosen.view(token_ids.shape), q_logits, largest_probs), logits


def check(config: EarlyExitConfig, sizes: TargetSizes) -> None:
    """Raises ConfigError unless the target has that layer, and the parts are made for it."""
    if config.exit_layer > sizes.num_layers:
        raise ConfigError(
            f"early_exit: exit_layer must be an integer from 1 to {sizes.num_layers}, the layers of this model, "
            f"not {config.exit_layer}."
        )
    may_learn = config.exit_head is not None and config.look_ahead is None and config.exit_layer < sizes.num_layers
    if config.learn is not None and not may_learn:
        raise ConfigError("early_exit: learn must be false without exit_head, with look_ahead or all layers, not true.")
    made_for = {"exit_layer": config.exit_layer, "hidden_size": sizes.hidden_size}
    if config.exit_head is not None:
        ExitHead.check(config.exit_head, **made_for, vocab_size=sizes.vocab_size)
    if config.look_ahead is not None:
        check_look_ahead(config.look_ahead, **made_for, num_draft=sizes.num_draft)
