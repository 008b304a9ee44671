"""What the metrics cost a step: counting in the worker, a report, and showing it in the front end."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import torch
from msgspec import msgpack

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Feedback
from vllm_specplugins.engine.metrics.export import Exporter
from vllm_specplugins.engine.metrics.report import Reporter
from vllm_specplugins.methods import parse_config
from vllm_specplugins.proposers.barrier import FaultBarrier

K, STEPS = 5, 2000
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit"}]


class Staged:
    """A proposer with the counters of a cascade."""

    def __init__(self) -> None:
        self.counters = {"0 prompt_lookup": StageCounters(), "1 early_exit": StageCounters()}

    def stage_counters(self) -> dict[str, StageCounters]:
        return self.counters

    def draft(self, num_reqs: int) -> None:
        """What a step of a cascade counts anyway, and its times."""
        for own in self.counters.values():
            own.asked, own.drafted, own.ms = own.asked + num_reqs, own.drafted + num_reqs * K, own.ms + 0.1
            own.accepted_at = [count + 1 for count in own.accepted_at or [0] * K]


def median_us(work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> str:
    """Median and p90 of a call."""
    times = []
    for _ in range(STEPS):
        before()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    return f"{np.median(times):6.1f} us (p90 {np.percentile(times, 90):6.1f})"


def main() -> None:
    config = parse_config({"method": "cascade", "num_speculative_tokens": K, "stages": STAGES})
    theirs = SimpleNamespace(
        _counter_cls=prometheus_client.Counter,
        _gauge_cls=prometheus_client.Gauge,
        _histogram_cls=prometheus_client.Histogram,
        per_engine_labelvalues={0: ["demo", "0"]},
    )
    exporter = Exporter(SimpleNamespace(speculative_config=SimpleNamespace(plugin_config=config)), theirs)
    print(f"torch {torch.__version__}, K = {K}, a cascade of two stages, {STEPS} steps")
    for num_reqs in (1, 16, 256):
        bench(exporter, num_reqs)


def bench(exporter: Exporter, num_reqs: int) -> None:
    """One line for batches of so many requests."""
    staged = Staged()
    barrier = FaultBarrier(staged, 1000, K, None)  # type: ignore[arg-type]
    reporter = Reporter(barrier, "cascade", torch.device("cpu"), clock=lambda: 0.0)
    ids = [f"request-{number}" for number in range(num_reqs)]
    drafted = np.full(num_reqs, K, np.int32)
    feedback = Feedback(ids, drafted, np.minimum(np.arange(num_reqs, dtype=np.int32) % 7, K))
    output = SimpleNamespace(ec_connector_output=None)

    def counted() -> None:
        barrier.count(feedback)
        barrier.counters.add_drafts(num_reqs, drafted)

    def step() -> None:
        counted()
        staged.draft(num_reqs)

    print(f"{num_reqs:4} requests: counting {median_us(counted)}", end=", ")
    print(f"report {median_us(lambda: reporter.attach(output), step)}", end=", ")
    report = output.ec_connector_output.ec_connector_stats.data["specplugins"]
    print(f"encoding {median_us(lambda: msgpack.decode(msgpack.encode(report)))}", end=", ")
    print(f"front end {median_us(lambda: exporter.record(report, 0))} for {len(report)} series")


if __name__ == "__main__":
    main()
