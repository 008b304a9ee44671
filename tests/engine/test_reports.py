"""Reports on their way, without an engine: what is due, what is in them, what they cost; and the dashboard's names."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RUNNER
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import vllm_specplugins
from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.metrics.export import Exporter
from vllm_specplugins.engine.metrics.names import PREFIX
from vllm_specplugins.engine.metrics.report import Reporter
from vllm_specplugins.engine.session import Session
from vllm_specplugins.isolation import faults as fault_causes
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import CAUSES

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
STAGE = "0 custom"
PACKAGE = Path(vllm_specplugins.__path__[0])


class Two:
    """Drafts two tokens for each request that wants so many; at its third step it raises."""

    def __init__(self) -> None:
        self.step = 0

    def propose(self, batch: DraftBatch) -> Draft:
        self.step += 1
        if self.step == 3:
            raise RuntimeError("planted")
        return Draft(np.full((batch.num_reqs, 2), 7, np.int32), np.minimum(batch.max_num_draft, 2))

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Any) -> None:
        pass


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def session_of_two() -> Session:
    return Session(FaultBarrier(Two(), vocab_size=10, max_num_draft=3, time_budget_ms=60_000))


def step(session: Session, ids: list[str], limits: list[int], drafted: list[int], accepted: list[int]) -> None:
    tokens = [np.array([1, 2], np.int32) for _ in ids]
    batch = DraftBatch(ids, tokens, np.array(limits, np.int32), [{} for _ in ids])
    session.propose(batch, Feedback(ids, np.array(drafted, np.int32), np.array(accepted, np.int32)))


def output() -> SimpleNamespace:
    return SimpleNamespace(ec_connector_output=None)


def report_of(carrier: Any) -> dict[str, Any]:
    return carrier.ec_connector_output.ec_connector_stats.data["specplugins"]


def test_what_is_in_a_report() -> None:
    """Steps by hand. Kills: totals where what was added belongs; a position off by one; a request's rate lost. Fails if
    a step counts in the times of drafting in which no request wanted a draft."""
    session = session_of_two()
    reporter = Reporter(session, "custom")
    step(session, ["a", "b", "c"], [3, 3, 0], [0, 0, 0], [0, 0, 0])
    first = report_of(reporter.attach(output(), is_last=True))
    step(session, ["a", "b"], [1, 3], [2, 2], [1, 2])
    step(session, ["a", "b"], [3, 3], [1, 2], [0, 0])  # raises
    reporter.forget(["b", "c", "unknown"])
    second = report_of(reporter.attach(output(), is_last=True))

    def counts(report: dict[str, Any]) -> dict[str, Any]:
        return {series.replace(f"\t{STAGE}", ""): n for series, n in report.items() if not isinstance(n, list)}

    assert counts(first) == {
        "asked": 2, "num_drafts": 2, "drafted_tokens": 4, "kept_tokens": 4, "draft_lengths\t0": 1,
        "draft_lengths\t2": 2, "circuit_breaker_open": 0.0, "drafting_off": 0.0,
    }  # fmt: skip
    assert counts(second) == {
        "asked": 4, "num_drafts": 2, "drafted_tokens": 3, "kept_tokens": 3, "num_draft_tokens": 7,
        "num_accepted_tokens": 3, "num_accepted_tokens_per_pos\t0": 2, "num_accepted_tokens_per_pos\t1": 1,
        "draft_lengths\t0": 2, "draft_lengths\t1": 1, "draft_lengths\t2": 1, "faults\traised": 1,
    }  # fmt: skip
    assert second["request_acceptance_rate"] == [0.5]
    assert len(first["step_draft_time_seconds"]) == 1 and 0 < second["step_draft_time_seconds"][0] < 1
    step(session, ["a"], [0], [0], [0])
    third = report_of(reporter.attach(output(), is_last=True))
    assert third["draft_lengths\t0"] == 1 and not any("seconds" in series for series in third)


def test_when_a_report_is_due() -> None:
    """Reports take a hundredth of the time; one that was not due loses nothing; an output that steps share is copied.
    Kills: a report at each step, whatever it costs; a shared output that carries one report for ever.
    """
    clock = Clock()
    session = session_of_two()
    reporter = Reporter(session, "custom", clock)
    step(session, ["a"], [3], [0], [0])
    reporter._not_before = clock.now + 1
    assert reporter.attach(output()).ec_connector_output is None
    clock.now += 2
    late = output()
    arrives_later = SimpleNamespace(model_runner_output=late)
    assert reporter.attach(arrives_later) is arrives_later
    assert report_of(late)[f"drafted_tokens\t{STAGE}"] == 2
    assert reporter.attach(output()).ec_connector_output is None, "nothing new"
    step(session, ["a"], [3], [2], [2])
    shared = output()
    assert report_of(reporter.attach(shared, is_last=True))[f"num_accepted_tokens\t{STAGE}"] == 2
    assert shared.ec_connector_output is None


def test_while_drafting_is_off() -> None:
    """Fails if the steps, which the scheduler adds to a report, wait for another count until drafting is on again."""
    reporter = Reporter(session_of_two(), "custom")
    reporter.is_off = True
    assert report_of(reporter.attach(output(), is_last=True))["drafting_off"] == 1.0
    assert report_of(reporter.attach(output(), is_last=True)) == {}
    reporter.is_off = False
    assert report_of(reporter.attach(output(), is_last=True)) == {"drafting_off": 0.0}
    assert reporter.attach(output(), is_last=True).ec_connector_output is None


def test_a_report_that_is_shown_here() -> None:
    """Fails if a report goes to vLLM's front end, too, where the worker shows it."""
    shown: list[Any] = []
    session = session_of_two()
    reporter = Reporter(session, "custom", show=shown.append)
    step(session, ["a"], [3], [0], [0])
    same = output()
    assert reporter.attach(same) is same and same.ec_connector_output is None
    assert shown[0][f"drafted_tokens\t{STAGE}"] == 2


def test_a_report_that_fails() -> None:
    """It is the last one. Kills: an engine that dies of its metrics."""
    session = session_of_two()
    reporter = Reporter(session, "custom")
    step(session, ["a"], [3], [0], [0])
    session.barrier.counters.draft_lengths = None  # type: ignore[assignment]
    for _ in range(2):
        same = output()
        assert reporter.attach(same, is_last=True) is same and same.ec_connector_output is None


def test_the_first_fault_is_an_increase() -> None:
    """In a cascade, as `increase(faults_total[15m])` sees it. Fails if a fault of any cause is the first sample of its
    series, or if code counts a fault of a cause that CAUSES lacks."""
    registry = CollectorRegistry()
    kinds = {"_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram}
    logger = SimpleNamespace(
        per_engine_labelvalues={0: ["m", "0"]},
        **{name: partial(kind, registry=registry) for name, kind in kinds.items()},
    )
    parts = [SimpleNamespace(method=method) for method in ("prompt_lookup", "custom")]
    config = SimpleNamespace(speculative_config=SimpleNamespace(plugin_config=SimpleNamespace(method="x", parts=parts)))
    exporter = Exporter(config, logger)

    def faults() -> dict[tuple[str, str], float]:
        samples = (sample for metric in registry.collect() for sample in metric.samples)
        return {
            (sample.labels["stage"], sample.labels["cause"]): sample.value
            for sample in samples
            if sample.name == f"{PREFIX}faults_total"
        }

    stages = ("0 prompt_lookup", "1 custom", "x")
    assert faults() == {(stage, cause): 0 for stage in stages for cause in CAUSES}
    exporter.record({f"faults\t{stage}\t{cause}": 1 for stage in stages for cause in CAUSES}, 0)
    assert faults() == {(stage, cause): 1 for stage in stages for cause in CAUSES}
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    counted = set(re.findall(r"\bFault\(([A-Z_]+)|faults\[([A-Z_]+)\]", code))
    assert {name for names in counted for name in names if name} >= {"RAISED", "HANGS", "SLOW", "NOT_FINITE"}
    assert all(getattr(fault_causes, name) in CAUSES for names in counted for name in names if name)
