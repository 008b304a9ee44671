"""Cost of the fault barrier per request and step, without a proposer's own work.

    python tests/bench/bench_barrier.py

The proposer returns the same draft at every step. Compared with a call of the bare proposer; the median and the
90th percentile of `--steps` steps, in microseconds per request.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # what an engine has loaded: its generator is kept, too

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.proposers.barrier import FaultBarrier

K, VOCAB_SIZE, HISTORY = 5, 128_000, 4096


class Fixed:
    """Drafts zeros."""

    def __init__(self, num_reqs: int):
        self.draft = Draft(np.zeros((num_reqs, K), np.int32), np.full(num_reqs, K, np.int32))

    def propose(self, batch: DraftBatch) -> Draft:
        return self.draft

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


def batch_of(matrix: np.ndarray, request_ids: list[str]) -> tuple[DraftBatch, Feedback]:
    """As the adapter of Model Runner V1 makes them."""
    num_reqs = len(request_ids)
    counts = np.full(num_reqs, 2, np.int32)
    batch = DraftBatch(
        request_ids,
        [matrix[row, :HISTORY] for row in range(num_reqs)],
        np.full(num_reqs, K, np.int32),
        [{}] * num_reqs,
    )
    return batch, Feedback(request_ids, counts, counts)


def microseconds(num_reqs: int, num_steps: int, call: Callable[[DraftBatch, Feedback], Any]) -> list[float]:
    matrix = np.zeros((num_reqs, HISTORY + 1), np.int32)
    request_ids = [f"cmpl-{row:032x}-0" for row in range(num_reqs)]
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        call(*batch_of(matrix, request_ids))
        times.append((time.perf_counter() - start) * 1e6 / num_reqs)
    return sorted(times[num_steps // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print(f"{platform.processor() or platform.machine()}, NumPy {np.__version__}, torch {torch.__version__}")
    for num_reqs in (1, 8, 32, 128):
        proposer = Fixed(num_reqs)
        bare = microseconds(num_reqs, steps, lambda batch, feedback, own=proposer: own.propose(batch))
        row = [f"{num_reqs:4} requests: bare {statistics.median(bare):6.2f}"]
        for name, budget_ms in (("in the engine's thread", None), ("in its own", 1000)):
            barrier = FaultBarrier(proposer, VOCAB_SIZE, K, budget_ms)
            times = microseconds(num_reqs, steps, barrier.propose)
            row.append(f"{name} {statistics.median(times):6.2f} (p90 {times[len(times) * 9 // 10]:6.2f})")
        print("; ".join(row))


if __name__ == "__main__":
    main()
