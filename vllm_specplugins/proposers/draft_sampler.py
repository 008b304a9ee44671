"""Model proposers draft with a part of the target, and choose tokens by `draft_sample_method`.

"greedy" takes the likeliest token. The others draw under the request's temperature, top-k, top-p and min-p
(kernels/rejection/drafts.py). "coupled" draws with the noise of verification, so q is one-hot; if that noise is
unknown, "coupled" is greedy. "probabilistic" draws with separate noise, and its logits are q. No code here waits for
the device or branches on its values, so an adapter may record a draft in a CUDA graph.

R: requests, N: rows (the same number for each request), H: hidden size, V: vocabulary, K: num_speculative_tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, largest_probs_of, rated_sample, sample_with_q
from vllm_specplugins.stage import Series, StageProposer
from vllm_specplugins.structures.arrays import Ints
from vllm_specplugins.structures.drafts import NO_COUNTS, DraftArrays, columns, nothing
from vllm_specplugins.target import Target

OnLogits = Callable[[int, torch.Tensor], None]  # receives each step's logits [R, V]
LARGEST_PROB = 1 - 16.0**-2  # upper bound of a head's probability, which is rated like a match of 16 tokens


class Prefix(NamedTuple):
    """The draft tokens before each row's next token, whose place is `positions` [N] int64. `drafts` is [N, T]; edits of
    the logits count its first `counts` [N] tokens (None: T)."""

    positions: torch.Tensor
    drafts: torch.Tensor
    counts: torch.Tensor | None = None


class Chosen(NamedTuple):
    """The next token of each row: ids [N] int; logits [N, V] of q if the tokens are "probabilistic"; and, on request,
    the largest probability before any filter, [N] float32."""

    next_ids: torch.Tensor
    q_logits: torch.Tensor | None = None
    largest_probs: torch.Tensor | None = None


class Steps:
    """Collects the chosen tokens of all steps in a draft: ids [R, num_steps] int32, logits [R, num_steps, V], and as
    the confidence the largest probabilities [R, num_steps]."""

    def __init__(self, target: Target, num_steps: int):
        last = target.last_token_ids
        self.draft = Draft.whole(last.new_empty(len(last), num_steps, dtype=torch.int32))

    def put(self, step: int, chosen: Chosen) -> None:
        self.draft.token_ids[:, step] = chosen.next_ids
        logits = self._with(self.draft.logits, step, chosen.q_logits)
        self.draft = replace(
            self.draft, confidence=self._with(self.draft.confidence, step, chosen.largest_probs), logits=logits
        )

    def _with(self, steps: torch.Tensor | None, step: int, values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return steps
        if steps is None:
            steps = values.new_empty(*self.draft.token_ids.shape, *values.shape[1:])
        steps[:, step] = values
        return steps


class ModelProposer(StageProposer):
    """Drafts with a part of the target; it has no state for requests."""

    continues_drafts = False  # whether it can read draft tokens; otherwise it needs the target's last state

    def __init__(self, config: Any, context: ProposerContext):
        self.config, self.max_num_draft = config, context.max_num_draft
        method = config.draft_sample_method
        self.is_greedy, self.is_coupled = method == "greedy", method == "coupled"
        self.is_one_hot = self.is_greedy or self.is_coupled
        self.set_max_model_len(context.max_model_len)
        self.head: Any = None  # a trained head; None: the head of the target
        self.part: Any = None  # the trained part
        self.training: Any = None  # trains the part while it serves; the engine sets it

    def set_max_model_len(self, max_model_len: int) -> None:
        """Sets the length of the longest request. Tokens after its end are read at its last position."""
        self.max_position = max_model_len - 1

    def close(self) -> None:
        """Ends training, if the part learns, and saves the weights."""
        if self.training is not None:
            self.training.close()

    def series(self) -> Iterable[Series]:
        return () if self.training is None else self.training.series()

    def propose(self, batch: DraftBatch) -> Draft:
        """Drafts K tokens for each request, and fewer near the end of its context."""
        assert batch.target is not None
        draft = self.draft_steps(batch.target, int(batch.max_num_draft.max(initial=0)))
        return replace(draft, num_draft=batch.max_num_draft)

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, limits: Ints) -> DraftArrays:
        """Drafts at most limits [R] int64 tokens, one by one, after each request's history and the prefix of its
        draft; if it cannot continue a prefix, after the history alone."""
        if prefix is not None and not self.continues_drafts:
            limits, prefix = np.where(prefix.num_draft == 0, limits, 0), None
        num_steps, num_reqs = max(limits.tolist(), default=0), len(limits)
        drafts = nothing(num_reqs, self.max_num_draft).cut(limits)
        if num_steps == 0:
            return drafts
        assert batch.target is not None
        # Rows that want no token start at their newest token: every slot up to it has been written.
        lengths = NO_COUNTS if prefix is None else prefix.num_draft * (limits > 0)
        if prefix is not None and (longest := max(lengths.tolist(), default=0)):
            begun, device = np.ascontiguousarray(prefix.token_ids[:, :longest]), batch.target.num_tokens.device
            given = torch.from_numpy(begun).to(device), torch.from_numpy(lengths).to(device)
            steps = self.continue_steps(batch.target, num_steps, *given)
        else:
            steps = self.draft_steps(batch.target, num_steps)
        drafts.token_ids[:, :num_steps], logits = steps.token_ids.cpu().numpy(), steps.logits
        if logits is None:
            return drafts
        q = np.arange(0, num_reqs * num_steps, num_steps)[:, None] + columns(drafts.token_ids)
        return drafts._replace(q=q, logits=logits.flatten(0, 1))

    def draft_steps(
        self,
        target: Target,
        num_steps: int,
        on_logits: OnLogits | None = None,
        rates: bool = False,
        followed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Draft:
        """Drafts token by token after each request's newest token; the confidence of a token is the largest probability
        of its step if `rates`. `followed` holds tokens [R, >= num_steps] int that replace the chosen ones as inputs,
        and their numbers, [R] int."""
        tokens, positions, states = target.last_token_ids, target.num_tokens - 1, target.last_hidden_states
        steps, of_one_pass = Steps(target, num_steps), self.one_pass(target, num_steps) if num_steps else None
        token_ids = steps.draft.token_ids
        fed = token_ids if followed is None else torch.empty_like(token_ids)
        for step in range(num_steps):
            prefix = Prefix(positions + 1, fed[:, :step])
            if of_one_pass is None:
                states = self.run_layers(target, step, tokens, positions, states)
                chosen, logits = self.choose(target, states, prefix, rates, on_logits is not None)
            else:
                logits = of_one_pass[step]
                chosen = self.sample(target, logits, prefix, rates)
            steps.put(step, chosen)
            if on_logits is not None and logits is not None:
                on_logits(step, logits)
            tokens = chosen.next_ids
            if followed is not None:
                tokens = fed[:, step] = torch.where(followed[1] > step, followed[0][:, step], tokens)
            positions = (positions + 1).clamp_(max=self.max_position)
        return steps.draft

    def continue_steps(self, target: Target, num_steps: int, begun: torch.Tensor, num_begun: torch.Tensor) -> Draft:
        """Drafts after the first `num_begun` [R] int64 tokens of `begun` [R, T] (see `continues_drafts`)."""
        raise NotImplementedError

    def one_pass(self, target: Target, num_steps: int) -> Sequence[torch.Tensor] | None:
        """Returns each step's logits [R, V], if one pass computes all of them; None: `run_layers` runs for each
        step."""
        return None

    def num_fed(self, num_steps: int) -> int:
        """Returns the number of tokens of a request that one pass of the target's layers reads."""
        return 1

    def run_layers(
        self, target: Target, step: int, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Returns states [R, H] for the head, of tokens [R] at these positions; `states` are those of the previous
        tokens."""
        raise NotImplementedError

    def logits(self, target: Target, states: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, V] of states [N, H]."""
        return (target.forward if self.head is None else self.head).logits(states)

    def choose(
        self, target: Target, states: torch.Tensor, prefix: Prefix, rates: bool = False, needs_logits: bool = False
    ) -> tuple[Chosen, torch.Tensor | None]:
        """Returns the tokens after states [N, H], and all logits [N, V] if their computation is necessary."""
        if self.head is None and self.is_greedy and target.edit is None and not (rates or needs_logits):
            return Chosen(target.forward.argmax(states)), None
        logits = self.logits(target, states)
        return self.sample(target, logits, prefix, rates), logits

    def sample(self, target: Target, logits: torch.Tensor, prefix: Prefix, rates: bool = False) -> Chosen:
        """Returns the tokens for logits [N, V]."""
        positions, drafts, counts = prefix
        if target.edit is not None:
            logits = target.edit(logits, drafts, positions, counts).to(logits.dtype)
        sampling, verified, num_reqs = target.sampling, target.sampling.verified, len(target.num_tokens)
        is_greedy = self.is_greedy or (self.is_coupled and verified is None)
        if is_greedy and not rates:
            return Chosen(logits.argmax(dim=-1))
        rows = torch.arange(num_reqs, device=logits.device).repeat_interleave(len(logits) // num_reqs)
        if is_greedy or verified is None:
            verified = Sampling(sampling.temperature, sampling.seeds)
        if not self.is_one_hot:
            drawn = replace(verified, seeds=sampling.seeds).at(rows)
            token_ids, q_logits = sample_with_q(logits, positions, drawn)
            return Chosen(token_ids, q_logits, largest_probs_of(logits, drawn.temperature) if rates else None)
        if not rates:
            return Chosen(coupled_sample(logits, positions, verified.at(rows)))
        token_ids, largest_probs = rated_sample(logits, positions, verified.at(rows), is_greedy)
        return Chosen(token_ids, None, largest_probs)
