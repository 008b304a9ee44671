"""Hundreds of requests at once, with each method; by hand: V1 takes a minute, V2 some ten."""

from pathlib import Path
from typing import Any

import pytest
from cases import generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, RUNNER, graphs
from kinds import KINDS, OF_V2

pytestmark = pytest.mark.long
NUM_TOKENS = 10
COUNTS = (256,) if INTERPRETED else (256, 1024)
METHODS = [kind for kind in KINDS if RUNNER == "v2" or kind not in OF_V2]


@pytest.fixture(scope="module", params=COUNTS)
def num_reqs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def prompts(num_reqs: int) -> list[list[int]]:
    texts = mixed_prompts(str(DEMO_MODEL), 50)
    return [texts[number % 50][-(3 + number % 19) :] for number in range(num_reqs)]


@pytest.fixture(scope="module")
def room(num_reqs: int) -> dict[str, Any]:
    """All prompts fit into the first step, and each request into two blocks."""
    blocks = {"num_gpu_blocks_override": 2 * num_reqs + 8, "max_model_len": 128}
    return {"max_num_seqs": num_reqs, "max_num_batched_tokens": 32 * num_reqs, **blocks}


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any, room: dict[str, Any]) -> Any:
    return generate(engine(None, enforce_eager=True, **room), prompts, [len(prompts)], max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("kind", METHODS)
def test_at_once(
    engine: Any, prompts: Any, room: dict[str, Any], expected: Any, tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    """Kills: an array or a launch that is sized for fewer requests; a draft of another row."""
    if kind in ("tree", "lookahead"):
        from tree_attention import attend_by_reference

        engine.stop()
        attend_by_reference(monkeypatch)
    num_reqs = len(prompts)
    llm = engine(KINDS[kind](tmp_path), **(graphs((num_reqs, 5 * num_reqs)) if INTERPRETED else {}), **room)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, decoding = scheduler.schedule, list[int]()

    def watched(*arguments: Any, **named: Any) -> Any:
        scheduled = schedule(*arguments, **named)
        decoding.append(len(scheduled.num_scheduled_tokens) - len(scheduled.scheduled_new_reqs))
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", watched)
    assert generate(llm, prompts, [num_reqs], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    assert max(decoding) == num_reqs and stats["drafted_tokens"] > 0 and stats["faults"] == {}
