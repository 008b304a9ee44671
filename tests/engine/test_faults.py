"""The fault barrier in a running engine: a proposer that fails costs drafts, never a request."""

import time
from typing import Any

import pytest
from cases import generate
from faulty import Faulty

from vllm_specplugins.draft import Counters, ProposerContext

FAULTS = [
    "raises",
    "hangs",
    "wrong rows",
    "wrong width",
    "too long",
    "negative length",
    "outside the vocabulary",
    "negative ids",
    "floats",
    "nothing",
]
PROMPTS = [[5, 6, 7, 8] * 5, list(range(30, 70)), [9] * 20]


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[list[int]]:
    return generate(engine(), PROMPTS, [3])


@pytest.fixture(scope="module")
def faulty_engine(engine: Any, expected: Any) -> Any:
    config = {
        "method": "custom",
        "proposer": "faulty:Faulty",
        "options": {"fault": "raises"},
        "num_speculative_tokens": 4,
        "time_budget_ms": 700,
    }
    return engine(config)


def plant(worker: Any, fault: str) -> None:
    """Runs in the worker: a new proposer with this fault behind a barrier as good as new."""
    barrier = worker._barrier
    vocab_size = worker.model_config.get_vocab_size()
    barrier.proposer = Faulty({"fault": fault}, ProposerContext(vocab_size, 1024, 8, 4, tokenize=lambda text: []))
    barrier.counters = Counters()
    barrier._fault_steps.clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_finish(faulty_engine: Any, expected: Any, fault: str) -> None:
    """Kills: any of the ten faults reaching vLLM."""
    faulty_engine.collective_rpc(plant, args=(fault,))
    assert generate(faulty_engine, PROMPTS, [3]) == expected
    [stats] = faulty_engine.collective_rpc("specplugins_stats")
    assert sum(stats["faults"].values()) == 3
    assert stats["switched_off"]
    assert stats["drafts"] > 0, "it worked before it failed"
    assert generate(faulty_engine, PROMPTS, [3]) == expected, "and requests are served after it is switched off"
    time.sleep(1.6 if fault == "hangs" else 0)  # a call that hangs must be back before the next test
