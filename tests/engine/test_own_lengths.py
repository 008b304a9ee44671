"""V2 chooses the lengths of drafts itself, from step times of the simulated device, at more load than a step takes."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import generate
from conftest import RUNNER

if RUNNER != "v2":
    pytest.skip("V1 chooses by its gate", allow_module_level=True)

from simulated_device.clock import timed_steps

WITHOUT_TAPES = "eager is enough"
K, BUDGET, NUM_REQS, NUM_TOKENS = 4, 16, 7, 44
LOOKUP = {"method": "prompt_lookup", "num_speculative_tokens": K}
COSTS: dict[str, Callable[[int], float]] = {
    "free": lambda num_tokens: 5.0,
    "dear": lambda num_tokens: 1.0 + 5.0 * num_tokens,  # at times K tokens pay, and mostly none
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[7 + number] * 4 * (number % 2) + [20 + 3 * number, 7 + number] for number in range(NUM_REQS)]


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> Any:
    return generate(engine(None, max_num_batched_tokens=BUDGET, max_model_len=512), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("costs", COSTS)
def test_under_load(engine: Any, prompts: Any, expected: Any, costs: str) -> None:
    """NUM_REQS x (1 + K) exceeds a step's tokens while K changes. Kills: an engine that ends at a step of K = 0 with a
    draft to verify; lengths that do not follow the times.
    """
    engine.stop()
    with timed_steps(COSTS[costs]) as clock:
        llm = engine(LOOKUP, max_num_batched_tokens=BUDGET, max_model_len=512, async_scheduling=True)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, steps = scheduler.schedule, []

        def watched(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            steps.append(scheduled.num_spec_tokens_to_schedule)
            return scheduled

        scheduler.schedule = watched
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
        assert max(steps[4:-4]) <= BUDGET // NUM_REQS - 1, "what drafts there is room for"
        assert K in steps, "longer ones where few requests are left"
        assert clock.seconds > 0 and llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    engine.stop()
