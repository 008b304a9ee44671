"""Compares the device's counts of drafts with counts on the host."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RUNNER
from vllm_specplugins.kernels.steps import Rows, Staged

from vllm_specplugins.counters import Counters, Histogram, StageCounters, count
from vllm_specplugins.draft import Feedback
from vllm_specplugins.structures.drafts import DraftArrays

pytestmark = pytest.mark.skipif(RUNNER != "v2", reason="V1 counts on the host")
K, SLOTS, STAGES = 3, 8, 2


class Late:
    """A copy that is there at once."""

    def __init__(self, request_ids: object, values: torch.Tensor):
        self._kept = values.clone()

    def values(self) -> np.ndarray:
        return self._kept.numpy()


def by_hand(own: StageCounters, stage: int, sent: DraftArrays, known: list[int], accepted: list[int]) -> None:
    for row, verified in enumerate(known):
        for place in range(verified):
            if int(sent.stage[row, place]) == stage:
                own.verified += 1
                if place < accepted[row]:
                    own.accepted += 1
                    count(own.accepted_at, place)


def test_counts_what_the_host_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps at random, rows of padding, of prompts and rehearsals among them. Fails if a row is counted that sampled
    nothing, a rehearsal is, a stage's token is another's, or a total twice.
    """
    from vllm_specplugins.engine.v2.feedback import report as module

    monkeypatch.setattr(module, "AsyncCopy", Late)
    rng, tally = np.random.default_rng(0), module.Tally(SLOTS, K, STAGES, torch.device("cpu"))
    found, stages = Counters(), [StageCounters() for _ in range(STAGES)]
    expected, by_stage = Counters(), [StageCounters() for _ in range(STAGES)]
    names = [f"r{slot}" for slot in range(SLOTS)]
    tally.start(dict(zip(names, range(SLOTS), strict=True)))
    sums, sent = np.zeros((SLOTS, 2)), None
    for step in range(40):
        verified = rng.integers(0, K + 1, SLOTS)
        accepted = rng.integers(0, verified + 1)
        samples = rng.random(SLOTS) < 0.8
        num_draft = torch.from_numpy(rng.integers(0, K + 1, SLOTS) * samples).int()
        stage = torch.from_numpy(rng.integers(0, STAGES, (SLOTS, K)))
        drafts = DraftArrays(torch.zeros(SLOTS, K).int(), num_draft, stage, torch.ones(SLOTS, K))
        max_draft = torch.from_numpy((num_draft.numpy() + 1) * samples).int()
        counts = step % 5 > 0
        tally.begin(counts)
        sampled, rejected = (accepted + 1) * samples, (verified - accepted) * samples
        slots = torch.arange(SLOTS).where(torch.from_numpy(samples), torch.tensor(SLOTS))
        fates = torch.from_numpy(sampled).int(), torch.from_numpy(rejected).int()
        sent = drafts if sent is None else sent
        known = torch.minimum(sent.num_draft, sum(fates) - 1).maximum(fates[0] - 1)
        parts = torch.where(num_draft > 0, num_draft, -1), num_draft
        table = torch.cat((sent.stage, sent.stage[:1])).int()  # in the order of the slots, and nobody's
        lengths = torch.cat((sent.num_draft, sent.num_draft[:1]))
        staged = Staged(lengths, table, *fates, stage, *parts, num_draft * 0)
        tally.add_rows(Rows(slots, *fates), max_draft, num_draft, staged)
        if counts:
            rows = np.flatnonzero(samples)
            expected.add(Feedback([], verified[rows], accepted[rows]))
            expected.add_drafts(len(rows), Histogram(num_draft.numpy()[rows].tolist()))
            sums[rows] += np.stack((verified[rows], accepted[rows]), axis=1)
            for index, own in enumerate(by_stage):
                by_hand(own, index, sent, known.tolist(), (sampled - 1).tolist())
                is_own = drafts.is_drafted & (stage == index)
                own.kept, own.drafts = own.kept + int(is_own.sum()), own.drafts + int(is_own.any(dim=1).sum())
                own.asked += int((parts[index] >= 0).sum())
                own.drafted += int(parts[index].clamp(min=0).sum())
        sent = drafts
        if step % 7 == 0:
            tally.move_to(found, stages)
    for _ in range(2):
        tally.move_to(found, stages)
    assert found == expected and stages == by_stage
    assert tally.take([*names[:4], "unknown"]) == [] and tally.take([]) == (sums[:4, 1] / sums[:4, 0]).tolist()
    assert tally.take(names[:4]) == []


def test_a_fault_after_a_step_of_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the empty drafts after a fault are held against rows of another step."""
    from vllm_specplugins.engine.v2.feedback import draft_tracker
    from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator

    monkeypatch.setattr(draft_tracker, "new_accept_probs", lambda *_: None)
    states, device = SimpleNamespace(max_num_reqs=SLOTS), torch.device("cpu")
    outcomes = draft_tracker.DraftTracker(STAGES, states, K, device)
    ones = torch.ones(SLOTS, dtype=torch.int32)
    outcomes.fates = ones, ones
    outcomes.begin(3, torch.arange(3), ones[:3], ones[:3] * 0)
    own: Any = SimpleNamespace(outcomes=outcomes, draft_tokens=torch.ones(SLOTS, K).long(), device=device)
    own._rates, own._policy, own.num_speculative_steps, own.draft_logits = False, "auto", K, None
    own.idx_mapping, own._keep = torch.zeros(SLOTS), partial(DeviceSpeculator._keep, own)
    DeviceSpeculator._draft_nothing(own, 3)
    assert outcomes.fates is None and own.draft_tokens.sum(dim=1).tolist() == [0] * 3 + [K] * (SLOTS - 3)


@pytest.mark.parametrize(
    ("before", "length", "has_prefill", "num_draft", "rests"),
    [
        (0, 0, False, 0, True),
        (0, 0, False, 2, False),
        (0, 0, True, 0, False),
        (0, 2, False, 0, False),
        (2, 0, False, 0, False),
    ],
)
def test_steps_at_rest(before: int, length: int, has_prefill: bool, num_draft: int, rests: bool) -> None:
    """A request that the step before had no room for still has a draft. Kills: a step at rest that verifies one, in
    which vLLM asserts that there is a speculator (`num_draft_tokens` in `rests`)."""
    from vllm_specplugins.engine.v2.feedback.report import Tally

    tally = Tally(SLOTS, K, 0, torch.device("cpu"))
    tally._drafted = before
    batch = SimpleNamespace(has_prefill=has_prefill, num_draft_tokens=num_draft, num_reqs=1)
    assert tally.rests(batch, length) is tally.rests(batch, length) is rests
