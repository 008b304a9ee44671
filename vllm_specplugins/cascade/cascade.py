"""Combines several proposers on the host."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_specplugins.cascade.built_in import offered_of
from vllm_specplugins.cascade.stage import Source, Stage
from vllm_specplugins.config import SpecConfig, stage_names
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.gate.draft_tracker import DraftTracker
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.methods import method_of
from vllm_specplugins.stage import StageProposer
from vllm_specplugins.structures.arrays import Ints, SlotTable, places_of
from vllm_specplugins.structures.drafts import DraftArrays, join, nothing


class Cascade(StageProposer):
    """Several proposers that serve as one. Under the policy `auto` the stages draft in turn. For each request and step
    the gate chooses the number of tokens to keep of the drafts so far, and the number of tokens that the next stage
    drafts after them or in their place. It maximises the sum of acceptance probabilities minus the price
    (Gate.split_draft). A lookup as the first stage also extends a model's tokens at no cost, since these tokens
    lengthen its match. Without a gate, the cascade takes the draft of the first stage that has one. Under the policy
    `verify` each stage checks the tokens of the previous stage (verify.py).
    """

    def __init__(self, config: SpecConfig, context: ProposerContext, proposers: Sequence[Any]):
        configs, verifies = config.stages, config.method_config.policy == "verify"
        self._context = context
        self._rows, self._tracker = SlotTable(), DraftTracker(len(configs), context.max_num_draft)
        has_gate = config.common.gate == "auto" and not (verifies and len(configs) == 1)
        self._gate = Gate(self._tracker, context.max_num_draft) if has_gate else None
        names = stage_names([stage.method for stage in configs])
        self.stages: list[Stage] = [
            method_of(config.method).stage_kind(index, config, name, proposer, context, self._gate)
            for index, (config, name, proposer) in enumerate(zip(configs, names, proposers, strict=True))
        ]
        self._sources: Sequence[Source] = self.stages
        if verifies:
            from vllm_specplugins.cascade.verify import checked

            self._sources = [checked(self.stages)]
        self._guards = [stage.guard for stage in self.stages if stage.guard is not None]
        self.reads_ends = any(guard.reads_ends for guard in self._guards)
        self._offered = offered_of(self)
        self._step_ms, self._num_context = 0.0, 0  # of the last step: ms of drafting, and tokens of its requests
        self._model_times: dict[int, tuple[float, int]] = {}  # in the last step: ms and tokens by stage

    def propose(self, batch: DraftBatch) -> Draft:
        start = time.perf_counter()
        if not self.stages[0].has_drafted(batch):
            self._begin_step()
        if self._offered is not None:
            if batch.offer is None:
                self._offered.proposer.share = 1.0  # a step without a pass skipped none
            else:
                self._offered.counters.ms += self._offered.proposer.took(batch.offer)
        if self._gate is not None:
            self._num_context = int(places_of(batch.token_ids)[1].sum())
        self._model_times = {}
        rows = self._rows_of(batch)
        drafts = self._first_draft(batch) if self._gate is None else self._draft(batch, self._gate)
        draft = self._tracker.keep(rows, drafts)
        self._step_ms = (time.perf_counter() - start) * 1000
        return draft

    def _nothing(self, batch: DraftBatch) -> DraftArrays:
        return nothing(batch.num_reqs, self._context.max_num_draft)

    def _first_draft(self, batch: DraftBatch) -> DraftArrays:
        drafts = self._nothing(batch)
        for source in self._sources:
            limits = source.limits(batch, _limits(batch) * (drafts.num_draft == 0))
            drafts = join(drafts, source.draft(batch, None, limits))
        return drafts

    def _draft(self, batch: DraftBatch, gate: Gate) -> DraftArrays:
        first, *others = self._sources
        if first.method.runs_target:
            drafts, others = None, list(self._sources)
        else:
            drafts = first.draft(batch, None, first.limits(batch, _limits(batch)))
        if drafts is not None and not others:
            return self._profitable(first, batch, drafts, gate)
        for source in others:
            drafts = self._continued(source, batch, drafts, gate)
        assert drafts is not None
        return drafts

    def _profitable(self, source: Source, batch: DraftBatch, drafts: DraftArrays, gate: Gate) -> DraftArrays:
        rows, none = self._rows.of(batch.request_ids), self._nothing(batch)
        alone = source.index, none.confidence, none.num_draft
        keep, _ = gate.split_draft(rows, drafts, *alone, _limits(batch), False)
        self._tracker.add_lengths(source.index, keep, drafts.num_draft)
        return drafts.cut(keep)

    def _continued(self, source: Source, batch: DraftBatch, drafts: DraftArrays | None, gate: Gate) -> DraftArrays:
        """Returns the drafts so far, with the drafts of one more source after them or in their place."""
        rows, allowed, none = self._rows.of(batch.request_ids), _limits(batch), self._nothing(batch)
        is_model, limits, ready = source.method.runs_target, source.limits(batch, allowed), none
        if not is_model:  # a lookup drafts before the gate chooses, since the gate uses its confidence
            ready = source.draft(batch, None, limits)
            limits = ready.num_draft
        continues = drafts is not None and is_model and source.proposer.continues_drafts
        so_far, last = none if drafts is None else drafts, (source.index, ready.confidence, limits)
        keep, num_more = gate.split_draft(rows, so_far, *last, allowed, continues)
        self._tracker.add_lengths(source.index, num_more, limits)
        if not num_more.any():
            return so_far.cut(keep)
        if drafts is None:
            return self._model_draft(source, batch, None, num_more)
        drafts = drafts.cut(keep)
        more = self._model_draft(source, batch, drafts, num_more) if is_model else ready.cut(num_more)
        drafts = join(drafts, more)
        room = np.where(num_more > 0, allowed - drafts.num_draft, 0)
        return self._extended(batch, drafts, room, gate)

    def _model_draft(
        self, source: Source, batch: DraftBatch, prefix: DraftArrays | None, num_tokens: Ints
    ) -> DraftArrays:
        start = time.perf_counter()
        drafts = source.draft(batch, prefix, num_tokens)
        self._model_times[source.index] = (time.perf_counter() - start) * 1000, int(num_tokens.max())
        return drafts

    def _extended(self, batch: DraftBatch, drafts: DraftArrays, room: Ints, gate: Gate) -> DraftArrays:
        """Returns the drafts, followed by the tokens of a lookup as the first stage that pay off."""
        lookup = self.stages[0]
        if not lookup.method.is_lookup:
            return drafts
        longer = join(drafts, lookup.draft(batch, drafts, lookup.limits(batch, room)))
        profitable = np.minimum(gate.profitable_length(self._rows.of(batch.request_ids), longer), longer.num_draft)
        return longer.cut(np.maximum(drafts.num_draft, profitable))

    def _rows_of(self, batch: DraftBatch) -> Ints:
        rows = self._rows.of(batch.request_ids)
        self._tracker.make_room(self._rows.num_rows)
        return rows

    def _begin_step(self) -> None:
        """Resets the time budget of each guarded stage, except for the stage that has run."""
        for stage in self.stages:
            if stage.guard is not None and stage is not self._offered:
                stage.guard.begin_step()

    def offer_length(self, batch: DraftBatch, num_accepted: Int32Array) -> int:
        """Returns the number of tokens that the engine's drafter will draft in this step; at 0 it only reads the step's
        tokens. The length is 0 while all requests copy: each had a fully accepted draft that was at least twice as long
        as that stage's K, and that ended with another stage's token. If the first stage is a lookup, the gate chooses
        the length by the drafter's expected gain over the lookup's drafts (Gate.offer_length)."""
        stage = self._offered
        if stage is None or self._gate is None or self._context.num_ranks > 1:  # other ranks do not know num_accepted
            return self._context.max_num_draft
        K, rows = stage.max_num_draft, self._rows_of(batch)
        copies = self._tracker.copied(rows, num_accepted, stage.index, 2 * K)
        length = 0 if copies else self._paying_length(self._gate, stage, batch, rows)
        stage.proposer.share = min(1.0, max(0, length - 1) / (K - 1) if K > 1 else length)
        return length

    def _paying_length(self, gate: Gate, offered: Stage, batch: DraftBatch, rows: Ints) -> int:
        lookup, allowed = self.stages[0], _limits(batch)
        if len(self.stages) != 2 or not lookup.method.is_lookup:
            return offered.max_num_draft
        self._begin_step()
        drafts = lookup.draft_ahead(batch, lookup.limits(batch, allowed))
        limits = offered.limits(batch, allowed)
        return gate.offer_length(rows, drafts, offered.index, limits, offered.max_num_draft, offered.proposer.saved_ms)

    @property
    def has_gate(self) -> bool:
        return self._gate is not None

    def use_profile(self, ms: Mapping[int, float]) -> None:
        if self._gate is not None:
            self._gate.use_profile(ms)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs each stage that uses the target's layers, with the largest possible work of a step."""
        draft: Draft
        *_, draft = (stage.proposer.dummy_run(batch) for stage in self.stages if stage.method.runs_target)
        return draft

    def observe(self, feedback: Feedback) -> None:
        rows = self._rows.known(feedback.request_ids)
        self._tracker.observe(rows, feedback.num_draft, feedback.num_accepted, feedback.num_refused)
        step_ms = None if self._gate is None else self._gate.counted_ms(feedback.step_ms, feedback.mixed_ms)
        if self._gate is not None and step_ms is not None and len(feedback.request_ids):
            # If the drafter was skipped, the time that it would have taken is added; otherwise the gate learns steps
            # that are too cheap.
            spared_ms = self._offered.proposer.spared_ms if self._offered else 0.0
            self._add_times(self._gate, feedback, step_ms + spared_ms)
        for guard in self._guards:
            guard.observe(feedback)

    def _add_times(self, gate: Gate, feedback: Feedback, step_ms: float) -> None:
        """Gives the gate the cost of the last step. The ranks agree on it, since their drafts would differ
        otherwise."""
        times = [self._model_times.get(stage.index, (stage.answer_ms, 0)) for stage in self.stages]
        step_ms, drafting_ms, gate.num_context, *model_ms = self._context.agreed(
            [step_ms, self._step_ms, self._num_context, *(ms for ms, _ in times)]
        )
        for index, (ms, (_, num_tokens)) in enumerate(zip(model_ms, times, strict=True)):
            gate.add_drafting(index, ms, num_tokens)
        num_reqs = len(feedback.request_ids)
        num_draft, num_accepted = (int(num.sum()) for num in (feedback.num_draft, feedback.num_accepted))
        num_others, num_right = feedback.num_others
        gate.add_step(num_reqs, step_ms, drafting_ms, num_draft + num_others, num_reqs + num_accepted + num_right)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._tracker.clear(self._rows.forget(request_ids))
        for guard in self._guards:
            guard.forget(request_ids)

    def finish(self, request_id: str, token_ids: Int32Array, tenant: bytes) -> None:
        for guard in self._guards:
            guard.end(request_id, token_ids)

    def settle_stages(self) -> None:
        for guard in self._guards:
            guard.settle()

    def activity(self) -> tuple[int, int]:
        counters = [stage.counters for stage in self.stages]
        asked, drafted = sum(each.asked for each in counters), sum(each.drafted for each in counters)
        return asked, drafted + sum(stage.num_spared for stage in self.stages)

    def stage_counters(self) -> dict[str, StageCounters]:
        self._tracker.move_to([stage.counters for stage in self.stages])
        return super().stage_counters()


def _limits(batch: DraftBatch) -> Ints:
    return batch.max_num_draft.astype(np.int64)
