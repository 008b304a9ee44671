"""Steps by shape, without an engine: what the scheduler records of a step, and what the worker makes of the records."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RUNNER

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.messages import StepFacts
from vllm_specplugins.engine.metrics.names import SEPARATOR, TABLE
from vllm_specplugins.engine.metrics.steps import BURST, StepTotals, StepWatch
from vllm_specplugins.engine.session import Session
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.stage import StageProposer

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")


def step(lengths: list[int], contexts: list[int], num_prompt_tokens: int = 0) -> SimpleNamespace:
    """A scheduled step of requests "0", "1" and so on, with drafts of these lengths."""
    drafts = {str(row): [7] * length for row, length in enumerate(lengths) if length}
    counts = {str(row): 1 + length for row, length in enumerate(lengths)}
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts,
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[],
        total_num_scheduled_tokens=sum(counts.values()) + num_prompt_tokens,
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=contexts),
    )


def outcome(num_reqs: int, graph: str | None = None, **more: Any) -> SimpleNamespace:
    stats = None if graph is None else SimpleNamespace(runtime_mode=f"CUDAGraphMode.{graph}")
    return SimpleNamespace(req_id_to_index={str(row): row for row in range(num_reqs)}, cudagraph_stats=stats, **more)


def rows_of(totals: StepTotals) -> list[dict[str, Any]]:
    """A dictionary for each series: its metric, its labels and its total."""
    labels = {metric.name: metric.labels for metric in TABLE}
    parts = ((series.split(SEPARATOR), total) for series, total in totals.counts.items())
    return [
        {"metric": name, **dict(zip(labels[name], values, strict=True)), "total": total}
        for (name, *values), total in parts
    ]


def test_a_step_is_recorded() -> None:
    """Kills: a time that a step with prompts, or an idle engine, gives to a decoding step; a rejection off by one; a
    whole draft that counts as rejected; a mean context of another number of requests; a report of one step twice.
    """
    now = [10.0]
    watch, observed = StepWatch(lambda: now[0]), list[tuple[str, float]]()
    totals = StepTotals(lambda series, seconds: observed.append((series, seconds)))
    watch.add(step([0, 0], [0, 0], num_prompt_tokens=30), outcome(2), [1, 1])
    now[0] = 10.5
    watch.add(step([3, 0], [100, 1200]), outcome(2, "FULL", specplugins=StepFacts(draft_seconds=0.125)), [3, 1])
    now[0] = 10.75
    watch.add(step([3, 4], [103, 1201]), outcome(2, "NONE"), [4, 1])
    watch.pause()
    now[0] = 90.0
    watch.add(step([3, 4], [107, 1202]), outcome(2, "FULL"), [1, 1])
    assert watch.taken() is None
    watch.pause()
    totals.add(watch.taken())
    totals.add(watch.taken())
    assert observed == [("shape_time_seconds\t4\t2048\t4", 0.5), ("shape_time_seconds\t4\t2048\t4", 0.25)]
    shape = {"batch": "4", "context": "2048", "draft_tokens": "4"}
    expected = [
        ("shape_draft_time_seconds", 0.125, {}), ("shape_tokens", 11, {}),
        *(("shape_steps", num, {"graph": graph}) for graph, num in (("full", 2), ("none", 1))),
        *(("shape_first_rejections", num, {"position": at}) for at, num in (("2", 1), ("none", 1), ("0", 3))),
    ]  # fmt: skip
    rows = rows_of(totals)
    assert len(rows) == len(expected)
    for name, total, more in expected:
        assert {"metric": name, **shape, **more, "total": total} in rows


def test_a_trimmed_step() -> None:
    """Three drafts, of which the device verified five tokens, and then all. Kills: the shape of a plan; requests of
    which nothing was verified that count as rejected."""
    for verified, draft_tokens, outcomes in ((5, "8", 0), (93, "32", 3)):
        watch, totals = StepWatch(), StepTotals(lambda *_: None)
        watch.add(step([31, 31, 31], [9, 9, 9]), outcome(3), [3, 1, 1], 31, verified)
        watch.pause()
        totals.add(watch.taken())
        rows = {row["metric"]: row for row in rows_of(totals)}
        assert rows["shape_tokens"]["draft_tokens"] == draft_tokens
        counts = [row["total"] for row in rows_of(totals) if row["metric"] == "shape_first_rejections"]
        assert sum(counts) == outcomes


@pytest.mark.parametrize(
    ("lengths", "chosen", "verified", "before", "reason"),
    [
        ([0, 0], 0, None, None, "scheduler"),
        ([0, 0], 5, None, None, "no draft"),
        ([0, 0], None, None, "gate", "gate"),
        ([5, 5], 5, 0, None, "trimmed"),
        ([5, 5], 5, 3, "gate", None),
        ([0, 0], 5, 3, None, "no draft"),  # the runner counts another step's
    ],
)
def test_why_there_is_no_draft(lengths: Any, chosen: Any, verified: Any, before: Any, reason: Any) -> None:
    """Kills: a reason that is given for a step with a draft, or one that another step's drafting had."""
    watch, totals = StepWatch(), StepTotals(lambda *_: None)
    watch.add(step([1], [9]), outcome(1, specplugins=StepFacts(undrafted=before)), [1])
    watch.add(step(lengths, [9, 9]), outcome(2), [1, 1], chosen, verified)
    watch.pause()
    totals.add(watch.taken())
    reasons = {row["reason"]: row["total"] for row in rows_of(totals) if row["metric"] == "undrafted_steps"}
    assert reasons == ({} if reason is None else {reason: 1})
    assert ("0" in {row.get("draft_tokens") for row in rows_of(totals)}) == (reason is not None)


def test_a_failure_reaches_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Kills: an engine that ends since a step cannot be recorded; a line in the log for every step."""
    watch = StepWatch()
    for _ in range(3 * BURST):
        watch.add(SimpleNamespace(), outcome(1), [1])
        assert not any(watch.taken() or ())
    assert len(caplog.records) == 1


class Even:
    """Drafts two tokens if the newest token is even."""

    def propose(self, batch: DraftBatch) -> Draft:
        lengths = np.array([2 * (1 - tokens[-1] % 2) for tokens in batch.token_ids], np.int32)
        return Draft(np.full((batch.num_reqs, 2), 7, np.int32), np.minimum(lengths, batch.max_num_draft))

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


class Gated(Even, StageProposer):
    """A cascade: asks its stage, and withholds all drafts but those of requests with a newest token above 9."""

    asked = drafted = 0

    def activity(self) -> tuple[int, int]:
        return self.asked, self.drafted

    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        self.asked, self.drafted = self.asked + 1, self.drafted + int(draft.num_draft.sum())
        shown = np.array([tokens[-1] > 9 for tokens in batch.token_ids])
        return Draft(draft.token_ids, draft.num_draft * shown)


@pytest.mark.parametrize(
    ("kind", "token", "limit", "reason"),
    [(Even, 2, 3, None), (Even, 1, 3, "no draft"), (Even, 2, 0, "limits"), (Gated, 2, 3, "gate"), (Gated, 12, 3, None)],
)
def test_why_a_proposer_drafts_nothing(kind: Any, token: int, limit: int, reason: str | None) -> None:
    """Kills: a gate that is blamed where the proposer had no draft; a reason that stays after a draft."""
    session = Session(FaultBarrier(kind(), vocab_size=100, max_num_draft=3, time_budget_ms=None))
    for newest in (1, token):
        batch = DraftBatch(["a"], [np.array([5, newest], np.int32)], np.array([limit], np.int32), [{}])
        session.propose(batch, Feedback(["a"], np.zeros(1, np.int32), np.zeros(1, np.int32)))
    assert session.undrafted == reason
