"""What model proposers share, and how they turn logits into draft tokens, by `draft_sample_method`.

"greedy" takes the likeliest token. The others draw under the request's temperature, top-k, top-p and min-p
(kernels/rejection/drafts.py): "coupled" with the noise of verification, so that q is one-hot, or as "greedy" where that
is not known; "probabilistic" with noise of its own, from logits that are q. N: rows, num_reqs of them times T.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_specplugins.config import chain_length
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer, ProposerContext
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, largest_probs_of, rated_sample, sample_with_q
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.tree import Tree, grow
from vllm_specplugins.structures.arrays import FIRST_CONFIDENCE, NO_COUNTS, Floats, Ints, columns
from vllm_specplugins.target import Target

Sees = Callable[[int, torch.Tensor], None]  # who is shown the logits of a step
LARGEST_PROB = 1 - 16.0**-2  # a head is trusted no further: its acceptance probability is learned as of a match of 16


class Chosen(NamedTuple):
    """Tokens [N]; if they are drawn with noise of their own, the logits [N, V] that they are drawn from; if it was
    asked for, the largest probability [N] of what they were chosen from, before anything was cut."""

    token_ids: torch.Tensor
    q_logits: torch.Tensor | None = None
    largest_probs: torch.Tensor | None = None


class DraftSampler:
    """Waits for nothing and branches on nothing that is on the device."""

    def __init__(self, method: str):
        self.is_greedy, self.is_one_hot = method == "greedy", method != "probabilistic"
        self.is_coupled = method == "coupled"

    def choose(
        self,
        target: Target,
        logits: torch.Tensor,  # [N, V]
        positions: torch.Tensor,  # [N] int64, of what is chosen
        drafts: torch.Tensor | None = None,  # [N, T] what was drafted before; None: nobody edits the logits
        counts: torch.Tensor | None = None,  # [N] how many of those; None: T
        rates: bool = False,
    ) -> Chosen:
        """Tokens, one of each row; with their largest probabilities if `rates`."""
        if target.edit is not None and drafts is not None:
            logits = target.edit(logits, drafts, positions, counts).to(logits.dtype)
        sampling, num_reqs = target.sampling, len(target.num_tokens)
        own, is_greedy = sampling.verified, self.is_greedy or (self.is_coupled and sampling.verified is None)
        if is_greedy and not rates:
            return Chosen(logits.argmax(dim=-1))
        rows = torch.arange(num_reqs, device=logits.device).repeat_interleave(len(logits) // num_reqs)
        if is_greedy or own is None:
            own = Sampling(sampling.temperature, sampling.seeds)
        if self.is_one_hot:
            if not rates:
                return Chosen(coupled_sample(logits, positions, own.at(rows)))
            token_ids, largest_probs = rated_sample(logits, positions, own.at(rows), is_greedy)
            return Chosen(token_ids, None, largest_probs)
        own = replace(own, seeds=sampling.seeds).at(rows)
        token_ids, q_logits = sample_with_q(logits, positions, own)
        return Chosen(token_ids, q_logits, largest_probs_of(logits, own.temperature) if rates else None)


@dataclass(slots=True)
class Steps:
    """What a model proposer drafts token by token.

    Args:
        token_ids: [num_reqs, num_steps] int32.
        logits: [num_reqs, num_steps, vocab_size], if the tokens are drawn with noise of their own.
        largest_probs: [num_reqs, num_steps] float32, if they were asked for; see Chosen.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor | None = None
    largest_probs: torch.Tensor | None = None

    @classmethod
    def of(cls, last: torch.Tensor, num_steps: int) -> "Steps":
        """Nothing yet, of so many requests."""
        return cls(last.new_empty(len(last), num_steps, dtype=torch.int32))

    def put(
        self,
        step: int,
        chosen: torch.Tensor,
        q_logits: torch.Tensor | None = None,
        largest_probs: torch.Tensor | None = None,
    ) -> None:
        """One token of each request, [num_reqs], and maybe what it was drawn from, and the largest probability."""
        self.token_ids[:, step] = chosen
        if largest_probs is not None:
            if self.largest_probs is None:
                self.largest_probs = largest_probs.new_empty(self.token_ids.shape)
            self.largest_probs[:, step] = largest_probs
        if q_logits is not None:
            if self.logits is None:
                self.logits = q_logits.new_empty(*self.token_ids.shape, q_logits.shape[-1])
            self.logits[:, step] = q_logits


class ModelProposer(Proposer):
    """Drafts with a part of the target, and keeps nothing of a request. `propose` waits for nothing and branches on
    nothing that is on the device, so an adapter may record it in a CUDA graph.

    Args:
        config: has `draft_sample_method`.
    """

    continues_drafts = (
        False  # whether it can be fed tokens; else it only begins drafts: it needs the target's last state
    )

    def __init__(self, config: Any, context: ProposerContext):
        self.max_num_draft = context.max_num_draft
        self._sampler = DraftSampler(config.draft_sample_method)
        self.set_max_model_len(context.max_model_len)
        self.learner: Learner | None = None

    @property
    def is_one_hot(self) -> bool:
        """Whether its tokens are certain, and not drawn with noise of their own."""
        return self._sampler.is_one_hot

    def set_max_model_len(self, max_model_len: int) -> None:
        """No request is longer than this: what would be drafted after its end is fed at its last position."""
        self.max_position = max_model_len - 1

    def close(self) -> None:
        """Saves what was learned."""
        if self.learner is not None:
            self.learner.close()

    def propose(self, batch: DraftBatch) -> Draft:
        """K tokens; a request near the end of its context gets fewer."""
        token_ids, logits = self.draft_from(batch.target, int(batch.max_num_draft.max(initial=0)))
        return Draft(token_ids, batch.max_num_draft, logits=logits)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """All that a step can make it run."""
        return self.propose(batch)

    def continue_drafts(
        self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, max_draft: Ints
    ) -> tuple[Int32Array, Ints, Floats, Ints | None, torch.Tensor | None]:
        """As of a lookup, token by token: also the row [num_reqs, K] of the logits that each token was drawn from, and
        these logits [N, vocab_size]; None where all are certain."""
        if not self.continues_drafts and len(num_begun):
            max_draft, num_begun = np.where(num_begun == 0, max_draft, 0), NO_COUNTS
        num_steps, num_reqs = max(max_draft.tolist(), default=0), len(max_draft)
        token_ids, q = np.zeros((num_reqs, self.max_num_draft), np.int32), None
        confidence = np.full(num_reqs, FIRST_CONFIDENCE)
        if num_steps == 0:
            return token_ids, max_draft, confidence, None, None
        assert batch.target is not None
        begun: tuple[torch.Tensor, ...] = ()
        # Rows that want nothing start at their newest token: after it no slot is read that was not written.
        lengths = num_begun * (max_draft > 0) if len(num_begun) else NO_COUNTS
        if longest := max(lengths.tolist(), default=0):
            fed, device = np.ascontiguousarray(prefix[:, :longest]), batch.target.num_tokens.device
            begun = torch.from_numpy(fed).to(device), torch.from_numpy(lengths).to(device)
        chosen, logits = self.draft_from(batch.target, num_steps, *begun)
        token_ids[:, :num_steps] = chosen.cpu().numpy()
        if logits is not None:
            q = np.arange(0, num_reqs * num_steps, num_steps)[:, None] + columns(token_ids)
            logits = logits.flatten(0, 1)
        return token_ids, max_draft, confidence, q, logits

    def draft_from(self, target: Any, num_steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[num_reqs, num_steps] int32 after each request's newest token; and, if they are drawn with their own noise,
        their logits, with the vocabulary last."""
        steps = self.draft_steps(target, num_steps)
        return steps.token_ids, steps.logits

    def draft_steps(self, target: Any, num_steps: int, sees: Sees | None = None, rates: bool = False) -> Steps:
        """The same; `sees` is shown each step's logits [num_reqs, vocab_size], edited; `rates` asks for the largest
        probabilities."""
        raise NotImplementedError

    def draft_tree(self, target: Target, num_nodes: int, branches: torch.Tensor, other: Any = None) -> Tree:
        """A tree of each request, or its chain; see tree.py. A request whose logits are edited must have its chain."""
        length, seen = chain_length(num_nodes), []
        steps = self.draft_steps(target, length, sees=lambda step, logits: seen.append(logits))
        positions = target.num_tokens[:, None] + torch.arange(length, device=target.num_tokens.device)
        sampling = target.sampling.verified if self._sampler.is_coupled else None
        if sampling is None:  # nobody knows the noise: as if all were greedy
            nobody = torch.zeros_like(target.num_tokens)
            sampling = Sampling(nobody.float(), nobody)
        return grow(steps.token_ids, torch.stack(seen, dim=1), positions, sampling, num_nodes, branches, other)
