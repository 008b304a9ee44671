"""Cascade: a proposer that holds proposers.

Its stages, cheapest first, are combined by one of POLICIES (see drafters.py) into one drafter, and a gate decides for
each request and step how many tokens are worth drafting (see gate.py).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

import numpy as np
import torch

from vllm_specplugins.config import CascadeConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer, ProposerContext, StageCounters, count
from vllm_specplugins.proposers.built_in import BuiltIn, Offered
from vllm_specplugins.proposers.drafters import (
    Allowed,
    Drafter,
    DraftToken,
    Extend,
    First,
    Lookup,
    Nothing,
    Rows,
    Verified,
    Whole,
    allows,
)
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.gate import FIRST_CONFIDENCE, Gate
from vllm_specplugins.proposers.guard import Guard
from vllm_specplugins.proposers.guarded import Guarded
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.proposers.switch import Clock

POLICIES: dict[str, Callable[[Drafter, Drafter], Drafter]] = {"first": First, "extend": Extend}


@dataclass(slots=True)
class Gated:
    """A drafter whose lengths a gate chooses: before it drafts, if drafting costs, and after it, if that was free.

    It leaves a request to `rival`, the index and name of the stage that drafts in its stead, where that one is expected
    to gain more.
    """

    drafter: Drafter
    gate: Gate
    index: int
    is_free: bool
    counters: StageCounters
    rival: tuple[int, str] | None = None
    drafting_ms: float = 0.0  # of the last step
    num_drafted: int = 0  # tokens that this was for, of each request

    def draft(self, batch: DraftBatch, begun: Rows, wanted: Sequence[int]) -> Rows:
        if self.is_free:
            drafts = self.drafter.draft(batch, begun, wanted)
            confidences = [draft[0].confidence if draft else 0.0 for draft in drafts]
            lengths = self._lengths(batch, confidences, [len(draft) for draft in drafts])
            return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]
        lengths = self._lengths(batch, [FIRST_CONFIDENCE] * batch.num_reqs, wanted)
        self.num_drafted = max(lengths, default=0)
        if self.num_drafted == 0:
            return [[] for _ in lengths]
        start = time.perf_counter()
        drafts = self.drafter.draft(batch, begun, lengths)
        self.drafting_ms = (time.perf_counter() - start) * 1000
        return drafts

    def _lengths(self, batch: DraftBatch, confidences: Sequence[float], most: Sequence[int]) -> list[int]:
        rivals = None
        if self.rival is not None:
            index, name = self.rival
            rivals = [index if allows(options, name) else None for options in batch.options]
        lengths = self.gate.lengths(batch.request_ids, self.index, confidences, most, rivals)
        for length, limit in zip(lengths, most, strict=True):
            if limit:
                count(self.counters.gate_lengths, length)
        return lengths


class Cascade:
    """See the module.

    Args:
        stages: the proposers, in the order of `config.stages`.
        clock: seconds, for the pauses of stages that are switched off.
    """

    def __init__(
        self,
        config: CascadeConfig,
        context: ProposerContext,
        stages: Sequence[Proposer],
        clock: Clock = time.monotonic,
    ):
        self._stages = stages
        self._context = context
        self._names = [stage.method for stage in config.stages]
        self._built_in = next((index for index, stage in enumerate(stages) if isinstance(stage, BuiltIn)), -1)
        self._gate = Gate() if config.gate == "auto" else None
        self._agreed = context.agreed
        self._counters = [StageCounters() for _ in stages]
        self._guards = {
            index: self._guard(index, clock) for index, stage in enumerate(stages) if not isinstance(stage, EarlyExit)
        }
        self._gated_stages: list[Gated] = []
        self._drafter = self._combine(config.policy)
        self._drafting_ms = 0.0  # of the last step
        self._sent: dict[str, list[DraftToken]] = {}  # the newest draft of each request

    def propose(self, batch: DraftBatch) -> Draft:
        """The stages' drafts, combined by the policy, as long as the gate thinks they pay."""
        start = time.perf_counter()
        for index, guard in self._guards.items():
            if index != self._built_in:
                guard.begin_step()
        if batch.offer is not None:
            self._counters[self._built_in].ms += batch.offer.ms
        nothing: Rows = [[] for _ in batch.request_ids]
        drafts = self._drafter.draft(batch, nothing, batch.max_num_draft.tolist())
        for request_id, draft in zip(batch.request_ids, drafts, strict=True):
            self._sent[request_id] = draft
            for token in draft:
                self._counters[token.stage].kept += 1
            for index in {token.stage for token in draft}:
                self._counters[index].drafts += 1
        joined = self._joined(drafts)
        self._drafting_ms = (time.perf_counter() - start) * 1000
        return joined

    def fit(self, max_model_len: int) -> None:
        """See EarlyExit.fit."""
        for stage in self._stages:
            if isinstance(stage, EarlyExit):
                stage.fit(max_model_len)

    def rehearse(self, batch: DraftBatch) -> Draft:
        """Runs each stage that runs the target as far as a step can make it, and remembers nothing."""
        assert batch.target is not None
        firsts = np.zeros(batch.num_reqs, np.int64)
        draft = Draft.empty(batch.num_reqs)
        for stage in self._stages:
            if isinstance(stage, EarlyExit):
                draft = stage.propose(batch)
                longest = np.zeros((batch.num_reqs, int(batch.max_num_draft.max(initial=1))), np.int64)
                stage.choose(batch.target, longest, firsts)
        return draft

    def _joined(self, drafts: Rows) -> Draft:
        num_draft = np.array([len(draft) for draft in drafts], np.int32)
        width = int(num_draft.max(initial=0))
        token_ids = np.zeros((len(drafts), width), np.int32)
        for row, draft in enumerate(drafts):
            token_ids[row, : len(draft)] = [token.token_id for token in draft]
        first = [draft[0].confidence if draft else 0.0 for draft in drafts]
        stage = [draft[-1].stage if draft else -1 for draft in drafts]
        return Draft(
            token_ids, num_draft, np.array(first, np.float32), self._logits(drafts, width), np.array(stage, np.int32)
        )

    def _logits(self, drafts: Rows, width: int) -> torch.Tensor | None:
        """[num_reqs, width, vocab_size]; a token without logits gets those of its one-hot q."""
        some = next((token.logits for draft in drafts for token in draft if token.logits is not None), None)
        if some is None:
            return None
        logits = some.new_zeros(len(drafts), width, some.shape[-1])
        for row, draft in enumerate(drafts):
            for column, token in enumerate(draft):
                if token.logits is None:
                    logits[row, column] = -torch.inf
                    logits[row, column, token.token_id] = 0.0
                else:
                    logits[row, column] = token.logits
        return logits

    def observe(self, feedback: Feedback) -> None:
        """Tells the stages' counters and the gate what became of the last drafts."""
        fates = zip(feedback.request_ids, feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)
        for request_id, num_draft, num_accepted in fates:
            sent = self._sent.pop(request_id, [])[:num_draft]
            for index, token in enumerate(sent):
                self._counters[token.stage].add_fate(index, index < num_accepted)
            if sent and self._gate is not None:
                for stage, start, end in _runs(sent):
                    if num_accepted >= start:
                        accepted = min(num_accepted, end) - start
                        self._gate.add_fate(request_id, stage, sent[start].confidence, end - start, accepted)
        if self._gate is not None and feedback.step_ms is not None:
            self._add_times(self._gate, feedback, feedback.step_ms)
        for guard in self._guards.values():
            guard.observe(feedback)

    def _add_times(self, gate: Gate, feedback: Feedback, step_ms: float) -> None:
        """Tells the gate what the last step cost: on every rank the same, or their drafts would differ."""
        stages = self._gated_stages
        step_ms, whole_ms, *drafting_ms = self._agreed(
            [step_ms, self._drafting_ms, *(stage.drafting_ms for stage in stages)]
        )
        for stage, ms in zip(stages, drafting_ms, strict=True):
            gate.add_drafting(stage.index, ms, stage.num_drafted)
        num_reqs = len(feedback.request_ids)
        num_emitted = num_reqs + int(feedback.num_accepted.sum())
        gate.add_step(num_reqs, step_ms, whole_ms, int(feedback.num_draft.sum()), num_emitted)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what the stages, the gate and the accounts hold of these requests."""
        for request_id in request_ids:
            self._sent.pop(request_id, None)
        if self._gate is not None:
            self._gate.forget(request_ids)
        for guard in self._guards.values():
            guard.forget(request_ids)

    @property
    def built_in_guard(self) -> Guard | None:
        """The guard of the stage that is built into the engine, which the engine calls."""
        return self._guards.get(self._built_in)

    def stage_counters(self) -> dict[str, StageCounters]:
        """Running totals by stage, under "index method"."""
        return {f"{index} {name}": self._counters[index] for index, name in enumerate(self._names)}

    def named_stages(self) -> list[tuple[str, Proposer]]:
        """The stages under the names that their counters have."""
        return [(f"{index} {name}", self._stages[index]) for index, name in enumerate(self._names)]

    def _combine(self, policy: str) -> Drafter:
        if policy == "verify":
            drafter: Drafter = Allowed(self._drafter_of(0), Nothing(), self._names[0])
            for index, stage in enumerate(self._stages[1:], start=1):
                assert isinstance(stage, EarlyExit)
                checked = Verified(drafter, stage, index, self._counters[index], self._counters[index - 1])
                drafter = Allowed(checked, drafter, self._names[index])
            return self._gated(drafter, len(self._stages) - 1)
        rivals = [(index, name) for index, name in enumerate(self._names[1:], start=1) if policy == "first"]
        drafters: list[Drafter] = [
            Allowed(self._gated(self._drafter_of(index), index, rival), Nothing(), self._names[index])
            for index, rival in zip_longest(range(len(self._stages)), rivals)
        ]
        return reduce(POLICIES[policy], drafters)

    def _drafter_of(self, index: int) -> Drafter:
        stage, counters = self._stages[index], self._counters[index]
        if isinstance(stage, EarlyExit):
            return Verified(Nothing(), stage, index, counters)
        if isinstance(stage, BuiltIn):
            return Offered(index, counters)
        if isinstance(stage, PromptLookup):
            drafter: Drafter = Lookup(stage, index)
        else:
            drafter = Whole(stage, index, self._context.max_num_draft, self._context.vocab_size)
        return Guarded(drafter, self._guards[index], counters, self._context.rank, self._context.agreed)

    def _guard(self, index: int, clock: Clock) -> Guard:
        """An exit has none: it fails with the cascade, or with the target."""
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

    def _gated(self, drafter: Drafter, index: int, rival: tuple[int, str] | None = None) -> Drafter:
        is_free = not isinstance(self._stages[index], EarlyExit)
        if self._gate is None:
            return drafter
        gated = Gated(drafter, self._gate, index, is_free, self._counters[index], rival)
        self._gated_stages.append(gated)
        return gated


def _runs(draft: list[DraftToken]) -> Iterator[tuple[int, int, int]]:
    """(stage, start, end) of each stretch of a draft that one stage made."""
    start = 0
    for end in range(1, len(draft) + 1):
        if end == len(draft) or draft[end].stage != draft[start].stage:
            yield draft[start].stage, start, end
            start = end
