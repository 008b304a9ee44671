"""A lookup and a model proposer that draft together on the device, by a policy, in tensors.

Nothing here waits, or goes by what a tensor holds, so that an adapter may record it in a CUDA graph.

An exit goes token by token. Under `auto` it is fed the lookup's tokens first; under `verify` all tokens are its own
(see staged.py: they are so on the host, too), and the lookup's give their confidence. What only begins drafts (a jump,
Medusa) drafts where the lookup's are not kept. R: requests, K: most tokens of a draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplugins.cascade.built_in import BuiltIn, guard_of
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.kernels.steps import AFTER, COMPARED, INSTEAD, Chain, join
from vllm_specplugins.proposers.draft_sampler import LARGEST_PROB, ModelProposer, Steps
from vllm_specplugins.structures.arrays import DraftArrays, of_stage
from vllm_specplugins.target import Target

LOOKUP, EXIT = 0, 1  # stages


@dataclass(frozen=True, slots=True)
class Parts:
    """What each stage did, [R] int each: tokens that it drafted, -1 where it was not asked; of the lookup's, how many
    the exit would have drafted itself, where it is there to check them. And the chain that is learned from, where
    drafts are trees."""

    looked_up: torch.Tensor
    exited: torch.Tensor
    confirmed: torch.Tensor
    learned: DraftArrays | None = None


class Stages:
    """What stands behind a barrier where a lookup and another stage draft together: who they are, and their counters.

    Args:
        names: of their methods.
        second: an exit, or a drafter built into the engine, which the engine calls: behind a guard.
    """

    def __init__(self, names: Sequence[str], lookup: Any, second: Any, context: ProposerContext):
        self.exit = second
        self._names = [f"{index} {name}" for index, name in enumerate(names)]
        self._stages, self._counters = (lookup, second), [StageCounters() for _ in names]
        self._context = context
        self.built_in_guard = self.guard_of(EXIT) if isinstance(second, BuiltIn) else None

    def guard_of(self, index: int) -> Guard:
        """A guard of a stage, and of it alone."""
        return guard_of(self._stages[index], self._names[index], self._counters[index], self._context)

    def stage_counters(self) -> dict[str, StageCounters]:
        """See Cascade.stage_counters."""
        return dict(zip(self._names, self._counters, strict=True))

    def named_stages(self) -> list[tuple[str, Any]]:
        """See Cascade.named_stages."""
        return list(zip(self._names, self._stages, strict=True))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """See the module.

    Args:
        stage: that runs the target, here called the exit.
        policy: that a cascade carries out ("first" is `auto` without a gate); None: the exit is alone.
        rates: whether to say each token's confidence.
        sees: of an exit that is alone, who is shown the logits of its steps.
        implementation: of kernels/steps.
    """

    stage: ModelProposer
    policy: str | None
    rates: bool
    sees: Callable[[int, torch.Tensor], None] | None = None
    implementation: str | None = None

    @property
    def continues(self) -> bool:
        """Whether the exit goes on after the lookup's tokens."""
        return self.policy == "auto" and self.stage.continues_drafts

    def draft(
        self,
        target: Target,
        found: DraftArrays | None,  # of the lookup; under `verify` shorter than is wanted of the exit; None without one
        own: torch.Tensor,  # [R], most tokens of the exit, at most num_steps
        num_steps: int,
    ) -> tuple[DraftArrays, Steps | None, Parts]:
        """The drafts; what the exit said, if it was asked for any token; and what each stage did."""
        if found is None:
            steps, drafts = self._alone(target, own, num_steps)
            return drafts, steps, Parts(own * 0 - 1, own, own * 0)
        if num_steps == 0:
            none = found.num_draft * 0
            return found, None, Parts(found.num_draft, none - 1, none)
        followed = (found.token_ids, found.num_draft) if self.continues else None
        steps = self.stage.draft_steps(target, num_steps, self.sees, self.rates, followed)
        sure = None if steps.largest_probs is None else steps.largest_probs.clamp(max=LARGEST_PROB)
        rule = COMPARED if self.policy == "verify" else AFTER if self.continues else INSTEAD
        adds = self.rates and self.stage.is_one_hot  # a drawn token must not say how likely it is to be verified
        *drafted, exited, confirmed = join(
            Chain(found.token_ids, found.num_draft, found.confidence),
            Chain(steps.token_ids, own, sure),
            rule,
            adds,
            self.implementation,
        )
        token_ids, num_draft, stage, confidence = drafted
        drafts = DraftArrays(token_ids, num_draft, stage, confidence)
        return drafts, steps, Parts(found.num_draft, exited, confirmed)

    def _alone(self, target: Target, own: torch.Tensor, num_steps: int) -> tuple[Steps | None, DraftArrays]:
        token_ids = own.new_zeros((len(own), self.stage.max_num_draft), dtype=torch.int32)
        steps = self.stage.draft_steps(target, num_steps, self.sees) if num_steps else None
        if steps is not None:
            token_ids[:, :num_steps] = steps.token_ids
        return steps, of_stage(0, token_ids, own, own * 0.0 + 1)


def keep_logits(
    kept: torch.Tensor,  # [max_num_reqs, K, vocab_size], of which rows are overwritten
    rows: torch.Tensor,  # [R] int64, whose they are
    token_ids: torch.Tensor,  # [R, K]
    logits: torch.Tensor | None,  # [R, num_steps, vocab_size], changed
    is_certain: torch.Tensor | None,  # [R, K] bool
) -> None:
    """Keeps what tokens were drawn from; of those that are certain, and all after the last step, one-hot."""
    num_steps = 0 if logits is None else logits.shape[1]
    places = token_ids[:, :, None].long()
    if logits is not None:
        if is_certain is not None:
            certain, own = is_certain[:, :num_steps, None], places[:, :num_steps]
            logits.masked_fill_(certain, -torch.inf)
            logits.scatter_(2, own, logits.gather(2, own).masked_fill_(certain, 0.0))
        kept[rows, :num_steps] = logits.to(kept.dtype)
    if num_steps < places.shape[1]:
        one_hot = kept.new_full((len(rows), places.shape[1] - num_steps, kept.shape[-1]), -torch.inf)
        kept[rows, num_steps:] = one_hot.scatter_(2, places[:, num_steps:], 0.0)
