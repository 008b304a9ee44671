"""What metrics by shape of a step (engine/metrics/steps.py) cost the host, of a step of bench_host_step.py.

    python benchmarks/bench_telemetry.py

One engine with prompt_lookup takes BURST steps with the metrics and as many without, in turns, since these are counted
together. Microseconds of the thread's CPU time: the least mean of BURST steps of either kind.
"""

import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from bench_host_step import BATCHES, Engine

ROUNDS, BLOCKS = 12, 12  # of requests, and of BURST steps in a round


def nothing(*arguments: Any) -> dict[str, Any]:
    """In the place of what records a step."""
    return {}


def main() -> None:
    engine = Engine("prompt_lookup")  # which puts its device in place before vLLM is imported

    from vllm_specplugins.engine.metrics.report import Reporter
    from vllm_specplugins.engine.metrics.steps import BURST, StepTotals, StepWatch

    parts = [(StepWatch, "add"), (StepWatch, "taken"), (StepTotals, "add"), (Reporter, "note")]
    switches = [patch.object(owner, name, nothing) for owner, name in parts]
    print("| requests | without, us | with, us | more |\n|---|---|---|---|")
    for num_requests in BATCHES:
        least = {True: 1e9, False: 1e9}
        for _ in range(ROUNDS):  # since requests end at 8,000 tokens
            engine._begin(num_requests)
            for block in range(BLOCKS):
                records = block % 2 == 0
                with ExitStack() as stack:
                    for switch in () if records else switches:
                        stack.enter_context(switch)
                    least[records] = min(least[records], sum(engine.times(BURST)) / BURST)
            engine._end()
        more = 100 * (least[True] / least[False] - 1)
        print(f"| {num_requests} | {least[False]:.0f} | {least[True]:.0f} | {more:.1f} % |", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
