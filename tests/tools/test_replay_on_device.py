"""Model Runner V2's choice of lengths, as `replay` plays it: what it knows, and when."""

from typing import Any

import numpy as np
import pytest
from vllm_specplugins.kernels.budget.host import share_budget

from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext
from vllm_specplugins.gate.budget import StepBudget
from vllm_specplugins.structures.drafts import DraftArrays, of_stage
from vllm_specplugins.tools.replay import on_device
from vllm_specplugins.tools.replay.costs import CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic, number_of
from vllm_specplugins.tools.replay.drafter import Drafter
from vllm_specplugins.tools.replay.on_device import DeviceLengths, PlannedLengths
from vllm_specplugins.tools.replay.simulate import Totals, simulate

K = 31


class Scripted(Proposer):
    """Drafts right tokens, in the step of each call as many as the script says."""

    def __init__(self, traffic: Traffic, script: list[int]):
        self.traffic, self.script, self.steps = traffic, script, 0

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids, num_draft = np.zeros((batch.num_reqs, K), np.int32), np.zeros(batch.num_reqs, np.int32)
        length, self.steps = self.script[self.steps % len(self.script)], self.steps + 1
        numbers = map(number_of, batch.request_ids)
        for row, (number, text, limit) in enumerate(zip(numbers, batch.token_ids, batch.max_num_draft, strict=True)):
            right = self.traffic.histories[number][len(text) :][: min(length, limit)]
            token_ids[row, : len(right)], num_draft[row] = right, len(right)
        return Draft(token_ids, num_draft, np.full(batch.num_reqs, 8, np.float32))

    def draft(self, batch: DraftBatch, prefix: DraftArrays, max_tokens: Any) -> DraftArrays:
        """Right tokens after the prefix, if the script has only drafts that continue others."""
        token_ids, num_draft = np.zeros((batch.num_reqs, K), np.int32), max_tokens * (self.script == [0])
        for row, (name, text) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            right = self.traffic.histories[number_of(name)][len(text) + prefix.num_draft[row] :][: num_draft[row]]
            token_ids[row, : len(right)] = right
        return of_stage(0, token_ids, num_draft, np.full(batch.num_reqs, 8.0))


def counted(num_reqs: int, num_tokens: int) -> Traffic:
    traffic = Traffic()
    for number in range(num_reqs):
        traffic.add([1, 2, 3], range(100 * number + 10, 100 * number + 10 + num_tokens))
    return traffic


def played(traffic: Traffic, script: list[int], lengths: Any, costs: CostTable, **more: Any) -> Totals:
    def build(context: ProposerContext) -> Any:
        return Scripted(traffic, script)

    load = Load(costs, len(traffic.histories), 0.0)
    return simulate(traffic, build, K, load, lengths=lengths, **more)


@pytest.mark.parametrize(("num_reqs", "verified"), [(3, [31, 31, 4, 0, 2]), (2, [31, 31, 31, 0, 31])])
def test_planned_lengths(num_reqs: int, verified: list[int]) -> None:
    """By hand: drafts of 4, 0, 2, 4, 0 tokens, not trimmed. Fails if a plan knows a draft that its scheduler cannot
    know yet, or if a step that fits a graph for free plans less than K tokens, or K where no request has a draft."""
    traffic = counted(num_reqs, 60)
    totals = played(traffic, [4, 0, 2], PlannedLengths, CostTable.line(10.0, 1.0))
    # A step of n requests costs 9 ms, and 1 ms for each of its tokens.
    first = [10 + num_reqs * (1 + length) - 1 for length in verified]
    recorded: list[float] = []

    class Noted(CostTable):
        def step_ms(self, num_reqs: int, num_draft: int = 0, num_context: int = 0) -> float:
            ms = CostTable.step_ms(self, num_reqs, num_draft, num_context)
            if num_reqs:
                recorded.append(ms)
            return ms

    again = played(counted(num_reqs, 60), [4, 0, 2], PlannedLengths, Noted({1: 10.0, 2: 11.0}))
    assert recorded[: len(first)] == first and again.step_ms == totals.step_ms == sum(recorded)


def test_budget_knows_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of 4, then none, in turns. Fails if the host's budget reads probabilities of the drafts that it is for, or
    the device those of a step before."""
    read_by: dict[str, list[bool]] = {"host": [], "device": []}
    choose, share = StepBudget.choose, share_budget

    def chosen(self: StepBudget, *arguments: Any) -> int:
        read_by["host"].append(bool(arguments[-1]()[0][arguments[-1]()[1]].any()))
        choose(self, *arguments)
        return 1

    def shared(accept_probs: Any, slots: Any, *arguments: Any) -> Any:
        read_by["device"].append(bool(accept_probs[slots].any()))
        return share(accept_probs, slots, *arguments)

    monkeypatch.setattr(StepBudget, "choose", chosen)
    monkeypatch.setattr(on_device, "share_budget", shared)
    played(counted(2, 60), [4, 0], DeviceLengths, CostTable.line(10.0, 0.01))
    # The first drafts are not known to the host.
    assert read_by["device"][:6] == [True, False] * 3
    assert read_by["host"][:6] == [True, True, False, True, False, True]


def test_what_pays() -> None:
    """Fails if drafts are verified that cost more than they bring, or if none are where they cost nothing."""
    dear, free = (CostTable.line(10.0, token_ms) for token_ms in (0.05, 0.01))
    traffic = counted(8, 400)
    plain = [played(traffic, [0], PlannedLengths, costs).step_ms for costs in (dear, free)]
    assert played(traffic, [31], DeviceLengths, free).step_ms < 0.06 * plain[1]
    assert played(traffic, [0], DeviceLengths, dear).step_ms < 1.05 * plain[0]


def test_a_copying_request_spares_the_drafter() -> None:
    """A drafter of 4 tokens that is never right, at 2 ms a token, beside a lookup that always is. Fails if the drafter
    drafts on while all requests copy, if it stops at once, or if a request that copies verifies its tokens."""
    traffic = counted(2, 600)  # at its end a step verifies tokens that a draft no longer has
    traffic.accepted = [{"head": np.zeros(600, np.int32)} for _ in range(2)]
    totals = played(traffic, [31], DeviceLengths, CostTable.line(10.0, 0.01), drafter=Drafter("head", 8.0, 0.0, 4))
    assert totals.accepted / totals.drafted > 0.9
    num_steps = round(totals.step_ms / 10.3)
    assert 2.0 * num_steps < totals.drafting_ms < 8.0 * num_steps


def test_a_lookup_continues_the_drafter() -> None:
    """A drafter of 2 right tokens beside a lookup that finds nothing but what follows them. Fails if the drafter's
    tokens go to the target alone, or if the lookup's come after others than the drafter's."""
    traffic = counted(1, 300)
    traffic.accepted = [{"head": np.full(300, 2, np.int32)}]
    totals = played(traffic, [0], DeviceLengths, CostTable.line(10.0, 0.01), drafter=Drafter("head", 1.0, 0.0, 2))
    assert totals.accepted / totals.drafted > 0.9 and totals.steps < 300 / 8
