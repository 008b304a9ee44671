"""Cascade: several proposers that serve together, as one proposer.

Its stages, cheapest first, are combined by a policy (see drafters.py, staged.py, auto.py) into one drafter, and a
gate decides for each request and step how many tokens are worth drafting (see gate.py).
"""

import time
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from vllm_specplugins.cascade.auto import Auto
from vllm_specplugins.cascade.built_in import BuiltIn, BuiltInDrafter
from vllm_specplugins.cascade.drafters import Drafter, First, HostDrafter, OptionFilter
from vllm_specplugins.cascade.staged import ModelDrafter, StagedDrafter
from vllm_specplugins.config import SpecConfig, rule, stage_names
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Proposer, ProposerContext
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.gate.ledger import Ledger
from vllm_specplugins.isolation.circuit_breaker import Clock
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.methods import method_of
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.slots import SlotTable
from vllm_specplugins.structures.views import places_of


class Cascade:
    """See the module.

    Args:
        stages: the proposers, in the order in which they stand there.
        clock: seconds, for the pauses of stages that are switched off.
    """

    def __init__(
        self,
        config: SpecConfig,
        context: ProposerContext,
        stages: Sequence[Any],
        clock: Clock = time.monotonic,
    ):
        self._stages = stages
        self._context = context
        self._names = [stage.method for stage in config.own.stages]
        self._methods = [method_of(name) for name in self._names]
        self._asked = stage_names(self._names)  # what options call them
        self._built_in = next((index for index, stage in enumerate(stages) if isinstance(stage, BuiltIn)), -1)
        self._max_num_draft = context.max_num_draft
        self._most = [stage.num_speculative_tokens or self._max_num_draft for stage in config.own.stages]
        self._rows, self._ledger = SlotTable(), Ledger(len(stages), self._max_num_draft)
        self._gate = Gate(self._ledger, self._max_num_draft) if config.common.gate == "auto" else None
        self._agreed = context.agreed
        self._counters = [StageCounters() for _ in stages]
        self._guards = {
            index: self._guard(index, clock) for index, method in enumerate(self._methods) if not method.runs_target
        }
        self._gated_stages: list[Auto] = []
        self._drafter = self._combine(rule(config))
        self._drafting_ms, self._num_context = 0.0, 0  # of the last step
        self._is_needed, self._offer_ms = True, {True: 0.0, False: 0.0}  # of the stage that is built in

    def propose(self, batch: DraftBatch) -> Draft:
        """The stages' drafts, combined by the policy, as long as the gate thinks they pay."""
        start = time.perf_counter()
        for index, guard in self._guards.items():
            if index != self._built_in:
                guard.begin_step()
        if batch.offer is not None:
            self._counters[self._built_in].ms += batch.offer.ms
            self._offer_ms[self._is_needed] = batch.offer.ms
        rows = self._rows.of(batch.request_ids)
        self._ledger.make_room(self._rows.num_rows)
        if self._gate is not None:
            self._num_context = int(places_of(batch.token_ids)[1].sum())
        draft = self._ledger.put(rows, self._drafter.draft(batch, None, batch.max_num_draft.astype(np.int64)))
        self._drafting_ms = (time.perf_counter() - start) * 1000
        return draft

    def needs_built_in(self, request_ids: Sequence[str], num_accepted: Int32Array) -> bool:
        """Whether anybody may use what the stage built into the engine would draft in this step; asked before it runs.

        Nobody may where of all requests a draft at least twice as long as its own, which another stage made or ended,
        has just been accepted whole: as long as text is copied it costs no more than the tokens that it has to see.
        """
        self._is_needed = True
        if self._gate is not None and self._context.num_ranks == 1:  # others do not know what became of drafts
            rows, least = self._rows.known(request_ids), 2 * self._most[self._built_in]
            self._is_needed = not self._ledger.went_on(rows, num_accepted, self._built_in, least)
        return self._is_needed

    def set_max_model_len(self, max_model_len: int) -> None:
        """See EarlyExit.set_max_model_len."""
        for stage, method in zip(self._stages, self._methods, strict=True):
            if method.runs_target:
                stage.set_max_model_len(max_model_len)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs each stage that runs the target as far as a step can make it, and remembers nothing."""
        assert batch.target is not None
        firsts = np.zeros(batch.num_reqs, np.int64)
        draft = Draft.empty(batch.num_reqs)
        for stage, method in zip(self._stages, self._methods, strict=True):
            if method.runs_target:
                draft = stage.propose(batch)
            if isinstance(stage, EarlyExit):
                longest = np.zeros((batch.num_reqs, int(batch.max_num_draft.max(initial=1))), np.int64)
                stage.choose(batch.target, longest, firsts)
        return draft

    def observe(self, feedback: Feedback) -> None:
        """Tells the stages' counters and the gate what became of the last drafts."""
        rows = self._rows.known(feedback.request_ids)
        self._ledger.settle(rows, feedback.num_draft, feedback.num_accepted)
        if self._gate is not None and feedback.step_ms is not None:
            # Where it was spared text goes on as found, which says nothing of what tokens cost: as if it had run.
            spared_ms = 0.0 if self._is_needed else self._offer_ms[True] - self._offer_ms[False]
            self._add_times(self._gate, feedback, feedback.step_ms + max(0.0, spared_ms))
        for guard in self._guards.values():
            guard.observe(feedback)

    def _add_times(self, gate: Gate, feedback: Feedback, step_ms: float) -> None:
        """Tells the gate what the last step cost: on every rank the same, or their drafts would differ."""
        stages = self._gated_stages
        step_ms, whole_ms, gate.num_context, *drafting_ms = self._agreed(
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
        for guard in self._guards.values():
            guard.forget(request_ids)

    def settle_stages(self) -> None:
        """Has the stages forget what is gone now, since no step follows for a while."""
        for guard in self._guards.values():
            guard.settle()

    @property
    def built_in_guard(self) -> Guard | None:
        """The guard of the stage that is built into the engine, which the engine calls."""
        return self._guards.get(self._built_in)

    def stage_counters(self) -> dict[str, StageCounters]:
        """Running totals by stage, under "index method"."""
        self._ledger.move_to(self._counters)
        return {f"{index} {name}": self._counters[index] for index, name in enumerate(self._names)}

    def named_stages(self) -> list[tuple[str, Proposer]]:
        """The stages under the names that their counters have."""
        return [(f"{index} {name}", self._stages[index]) for index, name in enumerate(self._names)]

    def _combine(self, policy: str | None) -> Drafter:
        if policy == "verify":
            return self._verified()
        if policy == "auto" and self._gate is not None:
            return self._by_gate(self._gate)
        return reduce(First, map(self._allowed, range(len(self._stages))))

    def _allowed(self, index: int) -> Drafter:
        return OptionFilter(self._drafter_of(index), None, self._asked[index], self._most[index])

    def _verified(self) -> Drafter:
        drafter = self._allowed(0)
        for index, stage in enumerate(self._stages[1:], start=1):
            assert isinstance(stage, EarlyExit)
            checked = StagedDrafter(drafter, stage, index, self._counters[index], self._counters[index - 1])
            drafter = OptionFilter(checked, drafter, self._asked[index], self._most[index])
        if self._gate is None or len(self._stages) == 1:
            return drafter
        return self._auto(self._gate, index, second=drafter, most=self._max_num_draft)

    def _by_gate(self, gate: Gate) -> Drafter:
        drafter = self._allowed(0)
        lookup = drafter if self._methods[0].is_lookup else None
        if self._methods[0].runs_target:
            limits = {"name": self._asked[0], "most": self._most[0]}
            drafter = self._auto(gate, 0, second=self._drafter_of(0), **limits)
        elif len(self._stages) == 1:
            drafter = self._auto(gate, 0, first=drafter)
        for index, stage in enumerate(self._stages[1:], start=1):
            drafter = self._auto(
                gate,
                index,
                first=drafter,
                second=self._drafter_of(index),
                lookup=lookup,
                is_free=not self._methods[index].runs_target,
                continues=isinstance(stage, EarlyExit),
                name=self._asked[index],
                most=self._most[index],
            )
        return drafter

    def _auto(self, gate: Gate, index: int, **drafters: Any) -> Auto:
        self._gated_stages.append(Auto(gate, self._rows, self._ledger, index, self._max_num_draft, **drafters))
        return self._gated_stages[-1]

    def _drafter_of(self, index: int) -> Drafter:
        stage, counters = self._stages[index], self._counters[index]
        if self._methods[index].runs_target:
            return ModelDrafter(stage, index, counters)
        if isinstance(stage, BuiltIn):
            return BuiltInDrafter(index, counters, self._max_num_draft)
        is_lookup = self._methods[index].is_lookup
        gate = None if is_lookup else self._gate  # lookups cost next to nothing
        return HostDrafter(stage, index, is_lookup, self._guards[index], counters, self._context, gate)

    def _guard(self, index: int, clock: Clock) -> Guard:
        """What runs the target has none: it fails with the cascade, or with the target."""
        budget_ms, num_ranks = self._context.time_budget_ms, self._context.num_ranks
        in_thread = index != self._built_in and budget_ms is not None
        on_all_ranks = index == self._built_in and num_ranks > 1
        return Guard(
            self._stages[index],
            f"Stage {index} ({self._names[index]})",
            self._counters[index],
            None if on_all_ranks else budget_ms,
            in_thread=in_thread,
            ends_process=on_all_ranks,
            clock=clock,
        )
