"""Cascade: several proposers that serve together, as one proposer.

Its stages, cheapest first, are combined by a policy. "verify": each stage's tokens are checked by the next one (see
staged.py). "auto": by request and step, the tokens of the stages so far, the next one's, or both, one after the other.
What each gains is the sum of its tokens' acceptance probabilities, less their price (Gate.split_draft).
Where a lookup stands first, what it finds after a model's tokens is added for free: a match that a model begins alike
is the longer for it, and brings a lot where a short one alone brings little. Without a gate the first stage that has
something drafts.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vllm_specplugins.cascade.built_in import BuiltIn, guard_of
from vllm_specplugins.cascade.stage import Stage
from vllm_specplugins.cascade.staged import Drafter, checked
from vllm_specplugins.config import SpecConfig, rule, stage_names
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Proposer, ProposerContext
from vllm_specplugins.gate.draft_tracker import DraftTracker
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.methods import method_of
from vllm_specplugins.structures.arrays import DraftArrays, Ints, SlotTable, nothing, places_of


class Cascade:
    """See the module.

    Args:
        stages: the proposers, in the order in which they stand there.
    """

    def __init__(self, config: SpecConfig, context: ProposerContext, stages: Sequence[Any]):
        self._context, self._max_num_draft = context, context.max_num_draft
        self._policy, own = rule(config), config.method_config.stages
        self._rows, self._tracker = SlotTable(), DraftTracker(len(stages), self._max_num_draft)
        self._gate = Gate(self._tracker, self._max_num_draft) if config.common.gate == "auto" else None
        methods = [stage.method for stage in own]
        self._names = [f"{index} {method}" for index, method in enumerate(methods)]
        self._stages = list[Stage]()
        for index, (proposer, name) in enumerate(zip(stages, stage_names(methods), strict=True)):
            row, counters = method_of(methods[index]), StageCounters()
            guard = None if row.runs_target else guard_of(proposer, self._names[index], counters, context)
            most = own[index].num_speculative_tokens or self._max_num_draft
            gate = None if row.is_lookup or row.is_late else self._gate  # these cost next to nothing
            self._stages.append(Stage(index, proposer, row, guard, counters, name, most, context, gate))
        self._guards = [stage.guard for stage in self._stages if stage.guard is not None]
        self._built_in = next((stage for stage in self._stages if isinstance(stage.proposer, BuiltIn)), None)
        self.built_in_guard = self._built_in.guard if self._built_in else None  # whom the engine calls it by
        self._drafting_ms, self._num_context = 0.0, 0  # of the last step
        self._looked_up: tuple[Any, DraftArrays] | None = None  # the lookup's drafts where it was asked before a step

    def propose(self, batch: DraftBatch) -> Draft:
        """The stages' drafts, combined by the policy, as long as the gate thinks they pay."""
        start = time.perf_counter()
        if self._looked_up is None or self._looked_up[0] != _texts_of(batch):
            self._begin_step()
        if batch.offer is not None and self._built_in is not None:
            self._built_in.counters.ms += self._built_in.proposer.took(batch.offer)
        rows = self._rows.of(batch.request_ids)
        self._tracker.make_room(self._rows.num_rows)
        if self._gate is not None:
            self._num_context = int(places_of(batch.token_ids)[1].sum())
        draft = self._tracker.keep(rows, self._draft(batch, batch.max_num_draft.astype(np.int64)))
        self._drafting_ms, self._looked_up = (time.perf_counter() - start) * 1000, None
        return draft

    def _begin_step(self) -> None:
        """Gives each stage but the one that has run its time for another step."""
        self._looked_up = None
        for guard in self._guards:
            if guard is not self.built_in_guard:
                guard.begin_step()

    def needs_built_in(self, batch: DraftBatch, num_accepted: Int32Array) -> bool:
        """Whether this step needs a draft of the stage built into the engine; asked before that stage runs.

        It needs none while all requests copy: each had a draft at least twice as long as that stage's, which another
        stage made or ended, accepted whole. Nor does it where a lookup stands first, and that stage is expected to gain
        less beside the lookup's drafts than its run costs (Gate.spares). The stage then costs no more than the tokens
        that it has to see.
        """
        stage, gate = self._built_in, self._gate
        if stage is None or gate is None or self._context.num_ranks > 1:  # other ranks do not know the accepted tokens
            return True
        rows = self._rows.of(batch.request_ids)
        self._tracker.make_room(self._rows.num_rows)
        self._looked_up = None
        least = 2 * stage.max_num_draft
        is_needed = not self._tracker.copied(rows, num_accepted, stage.index, least) and not self._spares(batch, rows)
        stage.proposer.is_needed = is_needed
        return is_needed

    def _spares(self, batch: DraftBatch, rows: Ints) -> bool:
        """Whether the lookup's drafts do without those of the built-in stage. They count as this step's."""
        first, built_in, gate = self._stages[0], self._built_in, self._gate
        if len(self._stages) != 2 or not first.method.is_lookup or built_in is None or gate is None:
            return False
        max_draft = batch.max_num_draft.astype(np.int64)
        self._begin_step()
        drafts = first.draft(batch, None, first.limits(batch, max_draft))
        self._looked_up = _texts_of(batch), drafts
        own = built_in.limits(batch, max_draft)
        return gate.spares(rows, drafts, built_in.index, own, built_in.proposer.saved_ms)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs each stage that runs the target as far as a step can make it, and remembers nothing."""
        draft: Draft
        *_, draft = (stage.proposer.dummy_run(batch) for stage in self._stages if stage.method.runs_target)
        return draft

    def observe(self, feedback: Feedback) -> None:
        """Tells the stages' counters and the gate what became of the last drafts."""
        rows = self._rows.known(feedback.request_ids)
        self._tracker.observe(rows, feedback.num_draft, feedback.num_accepted)
        if self._gate is not None and feedback.step_ms is not None:
            # Where it was spared text goes on as found, which says nothing of what tokens cost: as if it had run.
            spared_ms = self._built_in.proposer.spared_ms if self._built_in else 0.0
            self._add_times(self._gate, feedback, feedback.step_ms + spared_ms)
        for guard in self._guards:
            guard.observe(feedback)

    def _add_times(self, gate: Gate, feedback: Feedback, step_ms: float) -> None:
        """Tells the gate what the last step cost: on every rank the same, or their drafts would differ."""
        stages = self._stages
        step_ms, whole_ms, gate.num_context, *drafting_ms = self._context.agreed(
            [step_ms, self._drafting_ms, self._num_context, *(stage.drafting_ms for stage in stages)]
        )
        for stage, ms in zip(stages, drafting_ms, strict=True):
            gate.add_drafting(stage.index, ms, stage.num_drafted)
        num_reqs = len(feedback.request_ids)
        num_draft, num_accepted = (int(num.sum()) for num in (feedback.num_draft, feedback.num_accepted))
        num_forced, num_right = feedback.num_forced
        gate.add_step(num_reqs, step_ms, whole_ms, num_draft + num_forced, num_reqs + num_accepted + num_right)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what the stages and the tracker hold of these requests."""
        self._tracker.clear(self._rows.forget(request_ids))
        for guard in self._guards:
            guard.forget(request_ids)

    def settle_stages(self) -> None:
        """Has the stages forget what is gone now, since no step follows for a while."""
        for guard in self._guards:
            guard.settle()

    def stage_counters(self) -> dict[str, StageCounters]:
        """Running totals by stage, under "index method"."""
        counters = [stage.counters for stage in self._stages]
        self._tracker.move_to(counters)
        return dict(zip(self._names, counters, strict=True))

    def named_stages(self) -> list[tuple[str, Proposer]]:
        """The stages under the names that their counters have."""
        return [(name, stage.proposer) for name, stage in zip(self._names, self._stages, strict=True)]

    def _draft(self, batch: DraftBatch, max_draft: Ints) -> DraftArrays:
        """By the policy."""
        (first, *others), gate = self._stages, self._gate
        if self._policy == "verify":
            draft = partial(checked, self._stages)
            if gate is None or not others:
                return draft(batch, None, max_draft)
            return self._split(others[-1], draft, batch, None, max_draft, max_draft)
        if gate is None:  # each stage drafts for those for whom those before it have nothing
            drafts = nothing(len(max_draft), self._max_num_draft)
            for stage in self._stages:
                rest = stage.limits(batch, max_draft * (drafts.num_draft == 0))
                drafts = drafts.followed_by(stage.draft(batch, None, rest))
            return drafts
        max_own = first.limits(batch, max_draft)
        if first.method.runs_target:
            drafts = self._split(first, first.draft, batch, None, max_own, max_draft)
        else:
            drafts = first.draft(batch, None, max_own) if self._looked_up is None else self._looked_up[1]
            if not others:
                return self._split(first, None, batch, drafts, max_own * 0, max_draft)
        for stage in others:
            max_own = stage.limits(batch, max_draft)
            drafts = self._split(stage, stage.draft, batch, drafts, max_own, max_draft)
        return drafts

    def _split(
        self,
        stage: Stage,
        draft: Drafter | None,
        batch: DraftBatch,
        found: DraftArrays | None,
        max_own: Ints,
        most: Ints,
    ) -> DraftArrays:
        """As many tokens of the drafts that there are, and after them of a stage, as the gate chooses.

        Args:
            draft: of that stage; None: nothing comes after the drafts, which are its own.
            found: the drafts; None: there are none.
            max_own: [R], tokens that the stage may draft; `most` of all.
        """
        assert self._gate is not None
        rows, is_free = self._rows.of(batch.request_ids), not stage.method.runs_target
        none, offered = nothing(len(most), self._max_num_draft), None
        confidence = none.confidence
        if draft is not None and is_free:
            offered = draft(batch, None, max_own)
            confidence, max_own = offered.confidence, offered.num_draft
        drafts = none if found is None else found
        continues = found is not None and stage.method.runs_target and stage.proposer.continues_drafts
        kept, own = self._gate.split_draft(rows, drafts, stage.index, confidence, max_own, most, continues)
        self._tracker.add_lengths(stage.index, *((kept, drafts.num_draft) if draft is None else (own, max_own)))
        drafts, stage.num_drafted = drafts._replace(num_draft=kept), 0
        if draft is None or not own.any():
            return drafts
        if offered is None:
            stage.num_drafted, start = int(own.max()), time.perf_counter()
            offered = draft(batch, drafts, own)
            stage.drafting_ms = (time.perf_counter() - start) * 1000
        if found is None:
            return offered
        drafts = drafts.followed_by(offered._replace(num_draft=own))
        return self._prolonged(batch, drafts, rows, np.where(own > 0, most - drafts.num_draft, 0))

    def _prolonged(self, batch: DraftBatch, drafts: DraftArrays, rows: Ints, room: Ints) -> DraftArrays:
        """With what a lookup that stands first finds after them, as far as that pays."""
        lookup = self._stages[0]
        if self._gate is None or not lookup.method.is_lookup:
            return drafts
        longer = drafts.followed_by(lookup.draft(batch, drafts, lookup.limits(batch, room)))
        pays = np.minimum(self._gate.profitable_length(rows, longer), longer.num_draft)
        return longer._replace(num_draft=np.maximum(drafts.num_draft, pays))


def _texts_of(batch: DraftBatch) -> tuple[tuple[str, ...], list[int]]:
    """The requests of a batch and the lengths of their histories, which tell a step from another."""
    return tuple(batch.request_ids), list(map(len, batch.token_ids))
