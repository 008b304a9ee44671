"""Cascades in real engines: prompt lookup and early exit under each policy."""

from typing import Any

import pytest
from cases import EXIT, LOOKUP, NUM_TOKENS, cascade, generate
from conftest import INTERPRETED, RUNNER, spec_metrics

# On V2 the scheduler chooses for what drafts on the device, or late.
ALONE = [] if RUNNER == "v2" else [{**LOOKUP, "num_speculative_tokens": 31}, {**EXIT, "num_speculative_tokens": 4}]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="draft by draft without an engine in tests/cascade/test_drafters.py")
def test_verify_drafts_what_its_last_stage_drafts(engine: Any, prompts: Any, expected: Any) -> None:
    """As many tokens drafted and accepted as by early exit alone, in fewer passes of it."""

    def counted(llm: Any) -> dict[str, float]:
        before = spec_metrics(llm)  # other tests may have used this engine
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
        return {name: count - before[name] for name, count in spec_metrics(llm).items()}

    alone = counted(engine({**EXIT, "num_speculative_tokens": 4}))
    llm = engine(cascade("verify"))
    assert counted(llm) == alone
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["stages"]["0 prompt_lookup"]["kept"] > 0


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="as on V1, and slow through the interpreter")
def test_three_stages(engine: Any, prompts: Any, expected: Any) -> None:
    """Two exits behind each other share their KV slots; the deeper one has the last word."""
    first = {"method": "early_exit", "exit_layer": 1}
    llm = engine(cascade("verify", stages=(LOOKUP, first, EXIT)))
    assert generate(llm, prompts[:16], [8], max_tokens=NUM_TOKENS) == expected[:16]
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {} and stats["stages"]["1 early_exit"]["kept"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["verify"] if INTERPRETED else ["verify", "auto"])
def test_stages_by_request(engine: Any, prompts: Any, expected: Any, policy: str) -> None:
    """Option `stages`: only those stages draft, whatever the others in the batch are allowed."""
    llm = engine(cascade(policy))

    def drafted_by(*names: str) -> list[bool]:
        before = llm.collective_rpc("specplugins_stats")[0]["stages"]
        options = {"specplugins": {"stages": list(names)}}
        assert generate(llm, prompts[:8], [8], max_tokens=NUM_TOKENS, extra_args=options) == expected[:8]
        after = llm.collective_rpc("specplugins_stats")[0]["stages"]
        return [after[name]["drafted"] > before[name]["drafted"] for name in after]

    assert drafted_by("prompt_lookup") == [True, False]
    assert drafted_by("early_exit") == [False, True]
    assert drafted_by("early_exit", "prompt_lookup") == [True, True]


@pytest.mark.parametrize("method", ALONE)
def test_a_method_alone(engine: Any, prompts: Any, expected: Any, method: dict[str, Any]) -> None:
    """It is held back as a stage is. Fails if it has no gate, or if its counters have another name than without one."""
    llm = engine({**method, "gate": "auto"})
    assert generate(llm, prompts[:16], [8], max_tokens=NUM_TOKENS) == expected[:16]
    [stats] = llm.collective_rpc("specplugins_stats")
    [(name, stage)] = stats["stages"].items()
    assert name == f"0 {method['method']}" and stats["faults"] == {} and sum(stage["gate_lengths"]) > 0
