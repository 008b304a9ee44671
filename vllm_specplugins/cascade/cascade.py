"""Cascade: several proposers that serve together, as one proposer.

Its stages, cheapest first, are combined by a policy. "verify": each stage's tokens are checked by the next one (see
staged.py). "auto": by request and step, the tokens of the stages so far, the next one's, or both, one after the other.
What each choice gains is the sum of its tokens' acceptance probabilities, by the ledger, less their price; what it
costs the batch are the passes of a stage that runs the target (see Gate.split_draft). Where a lookup stands first, what
it finds after a model's tokens is added for free. Where these are what it had found, its match is the longer for it: a
short match alone brings little, one that a model begins alike a lot. Without a gate the first stage that has something
drafts.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vllm_specplugins.cascade.built_in import BuiltIn, BuiltInDrafter
from vllm_specplugins.cascade.drafters import Drafter, HostDrafter, ModelDrafter, Stage, allows
from vllm_specplugins.cascade.staged import StagedDrafter
from vllm_specplugins.config import SpecConfig, rule, stage_names
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Proposer, ProposerContext
from vllm_specplugins.gate.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.gate.ledger import Ledger
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.methods import method_of
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.draft_arrays import Array, DraftArrays, nothing
from vllm_specplugins.structures.requests import Ints, SlotTable, places_of


class Cascade:
    """See the module.

    Args:
        stages: the proposers, in the order in which they stand there.
    """

    def __init__(
        self,
        config: SpecConfig,
        context: ProposerContext,
        stages: Sequence[Any],
    ):
        self._context, self._max_num_draft = context, context.max_num_draft
        self._policy, own = rule(config), config.own.stages
        self._rows, self._ledger = SlotTable(), Ledger(len(stages), self._max_num_draft)
        self._gate = Gate(self._ledger, self._max_num_draft) if config.common.gate == "auto" else None
        names = [stage.method for stage in own]
        self._names = [f"{index} {name}" for index, name in enumerate(names)]
        self._stages: list[Stage] = []
        for index, (proposer, name) in enumerate(zip(stages, stage_names(names), strict=True)):
            self._add_stage(proposer, names[index], name, own[index].num_speculative_tokens)
        self._guards = [stage.guard for stage in self._stages if stage.guard is not None]
        self._built_in = next((stage for stage in self._stages if isinstance(stage.proposer, BuiltIn)), None)
        self._drafting_ms, self._num_context = 0.0, 0  # of the last step
        self._is_needed, self._offer_ms = True, {True: 0.0, False: 0.0}  # of the stage that is built in

    def propose(self, batch: DraftBatch) -> Draft:
        """The stages' drafts, combined by the policy, as long as the gate thinks they pay."""
        start = time.perf_counter()
        for guard in self._guards:
            if guard is not self.built_in_guard:
                guard.begin_step()
        if batch.offer is not None and self._built_in is not None:
            self._built_in.counters.ms += batch.offer.ms
            self._offer_ms[self._is_needed] = batch.offer.ms
        rows = self._rows.of(batch.request_ids)
        self._ledger.make_room(self._rows.num_rows)
        if self._gate is not None:
            self._num_context = int(places_of(batch.token_ids)[1].sum())
        draft = self._ledger.put(rows, self._draft(batch, batch.max_num_draft.astype(np.int64)))
        self._drafting_ms = (time.perf_counter() - start) * 1000
        return draft

    def needs_built_in(self, request_ids: Sequence[str], num_accepted: Int32Array) -> bool:
        """Whether anybody may use what the stage built into the engine would draft in this step; asked before it runs.

        Nobody may where of all requests a draft at least twice as long as its own, which another stage made or ended,
        has just been accepted whole: as long as text is copied it costs no more than the tokens that it has to see.
        """
        self._is_needed = True
        stage = self._built_in
        if stage and self._gate and self._context.num_ranks == 1:  # others do not know what became of drafts
            rows = self._rows.known(request_ids)
            self._is_needed = not self._ledger.went_on(rows, num_accepted, stage.index, 2 * stage.max_num_draft)
        return self._is_needed

    def set_max_model_len(self, max_model_len: int) -> None:
        """See EarlyExit.set_max_model_len."""
        for stage in self._stages:
            if stage.method.runs_target:
                stage.proposer.set_max_model_len(max_model_len)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs each stage that runs the target as far as a step can make it, and remembers nothing."""
        assert batch.target is not None
        firsts = np.zeros(batch.num_reqs, np.int64)
        draft = Draft.empty(batch.num_reqs)
        for stage in self._stages:
            if stage.method.runs_target:
                draft = stage.proposer.propose(batch)
            if isinstance(stage.proposer, EarlyExit):
                longest = np.zeros((batch.num_reqs, int(batch.max_num_draft.max(initial=1))), np.int64)
                stage.proposer.next_tokens(batch.target, longest, longest, longest, firsts)
        return draft

    def observe(self, feedback: Feedback) -> None:
        """Tells the stages' counters and the gate what became of the last drafts."""
        rows = self._rows.known(feedback.request_ids)
        self._ledger.settle(rows, feedback.num_draft, feedback.num_accepted)
        if self._gate is not None and feedback.step_ms is not None:
            # Where it was spared text goes on as found, which says nothing of what tokens cost: as if it had run.
            spared_ms = 0.0 if self._is_needed else self._offer_ms[True] - self._offer_ms[False]
            self._add_times(self._gate, feedback, feedback.step_ms + max(0.0, spared_ms))
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
        num_emitted = num_reqs + int(feedback.num_accepted.sum())
        gate.add_step(num_reqs, step_ms, whole_ms, int(feedback.num_draft.sum()), num_emitted)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what the stages and the ledger hold of these requests."""
        self._ledger.clear(self._rows.forget(request_ids))
        for guard in self._guards:
            guard.forget(request_ids)

    def settle_stages(self) -> None:
        """Has the stages forget what is gone now, since no step follows for a while."""
        for guard in self._guards:
            guard.settle()

    @property
    def built_in_guard(self) -> Guard | None:
        """The guard of the stage that is built into the engine, which the engine calls."""
        return self._built_in.guard if self._built_in else None

    def stage_counters(self) -> dict[str, StageCounters]:
        """Running totals by stage, under "index method"."""
        counters = [stage.counters for stage in self._stages]
        self._ledger.move_to(counters)
        return dict(zip(self._names, counters, strict=True))

    def named_stages(self) -> list[tuple[str, Proposer]]:
        """The stages under the names that their counters have."""
        return [(name, stage.proposer) for name, stage in zip(self._names, self._stages, strict=True)]

    def _draft(self, batch: DraftBatch, max_draft: Ints) -> DraftArrays:
        """By the policy."""
        (first, *others), gate = self._stages, self._gate
        if self._policy == "verify":
            *_, last = self._stages
            checked = partial(self._checked, last.index)
            if gate is None or not others:
                return checked(batch, None, max_draft)
            return self._split(gate, last, checked, batch, None, max_draft, max_draft)
        if gate is None:
            return self._first(batch, max_draft)
        max_own = first.limits(batch, max_draft)
        if first.method.runs_target:
            drafts = self._split(gate, first, first.draft, batch, None, max_own, max_draft)
        else:
            drafts = first.draft(batch, None, max_own)
            if not others:
                return self._split(gate, first, None, batch, drafts, max_own * 0, max_draft)
        for stage in others:
            max_own = stage.limits(batch, max_draft)
            drafts = self._split(gate, stage, stage.draft, batch, drafts, max_own, max_draft)
        return drafts

    def _first(self, batch: DraftBatch, max_draft: Ints) -> DraftArrays:
        """Without a gate: each stage drafts for those for whom those before it have nothing."""
        drafts = nothing(len(max_draft), self._max_num_draft)
        for stage in self._stages:
            rest = stage.limits(batch, max_draft * (drafts.num_draft == 0))
            drafts = drafts.followed_by(stage.draft(batch, None, rest))
        return drafts

    def _checked(self, index: int, batch: DraftBatch, prefix: DraftArrays | None, max_draft: Array) -> DraftArrays:
        """What the stages up to this one draft, each checked by the next; without it where options do not allow it."""
        stage = self._stages[index]
        drafts, allowed = stage.draft(batch, prefix, stage.limits(batch, max_draft)), None
        if index:
            allowed = allows(batch.options, stage.name)
        if allowed is None:
            return drafts
        return drafts.followed_by(self._checked(index - 1, batch, prefix, np.where(allowed, 0, max_draft)))

    def _split(
        self,
        gate: Gate,
        stage: Stage,
        draft: Drafter | None,
        batch: DraftBatch,
        found: DraftArrays | None,
        max_own: Ints,
        max_draft: Ints,
    ) -> DraftArrays:
        """As many tokens of the drafts that there are, and after them of a stage, as the gate chooses.

        Args:
            draft: of that stage; None: nothing comes after the drafts, which are its own.
            found: the drafts; None: there are none.
            max_own: [R], tokens that the stage may draft.
        """
        rows, is_free = self._rows.of(batch.request_ids), not stage.method.runs_target
        offered, confidence = None, np.full(len(max_draft), FIRST_CONFIDENCE)
        if draft is not None and is_free:
            offered = draft(batch, None, max_own)
            confidence, max_own = offered.confidence, offered.num_draft
        drafts = nothing(len(max_draft), self._max_num_draft) if found is None else found
        continues = found is not None and isinstance(stage.proposer, EarlyExit)
        kept, own = gate.split_draft(rows, drafts, stage.index, confidence, max_own, max_draft, continues)
        self._ledger.add_lengths(stage.index, *((kept, drafts.num_draft) if draft is None else (own, max_own)))
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
        return self._prolonged(gate, batch, drafts, rows, np.where(own > 0, max_draft - drafts.num_draft, 0))

    def _prolonged(self, gate: Gate, batch: DraftBatch, drafts: DraftArrays, rows: Ints, room: Ints) -> DraftArrays:
        """With what a lookup that stands first finds after them, as far as that pays."""
        lookup = self._stages[0]
        if not lookup.method.is_lookup:
            return drafts
        longer = drafts.followed_by(lookup.draft(batch, drafts, lookup.limits(batch, room)))
        pays = np.minimum(gate.profitable_length(rows, longer), longer.num_draft)
        return longer._replace(num_draft=np.maximum(drafts.num_draft, pays))

    def _add_stage(self, proposer: Any, method: str, name: str, max_own: int | None) -> None:
        row, index, counters = method_of(method), len(self._stages), StageCounters()
        is_built_in, guard, draft = isinstance(proposer, BuiltIn), None, ModelDrafter(proposer, index, counters).draft
        if not row.runs_target:
            budget_ms, on_all_ranks = self._context.time_budget_ms, is_built_in and self._context.num_ranks > 1
            guard = Guard(
                proposer,
                f"Stage {index} ({method})",
                counters,
                None if on_all_ranks else budget_ms,
                in_thread=not is_built_in and budget_ms is not None,
                ends_process=on_all_ranks,
            )
            gate = None if row.is_lookup or row.is_late else self._gate  # these cost next to nothing
            draft = HostDrafter(proposer, index, row.is_lookup, guard, counters, self._context, gate).draft
        elif self._policy == "verify" and index:
            cheap = partial(self._checked, index - 1)
            draft = StagedDrafter(cheap, proposer, index, counters, self._stages[-1].counters).draft
        if is_built_in:
            draft = BuiltInDrafter(index, counters, self._max_num_draft).draft
        self._stages.append(Stage(index, proposer, row, draft, guard, counters, name, max_own or self._max_num_draft))
