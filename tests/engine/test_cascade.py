"""Cascades in real engines under each policy, and jumps: what they are fed, and outputs that do not depend on them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import EXIT, LOOKUP, NUM_TOKENS, STRESS, cascade, generate
from conftest import INTERPRETED, NUM_LAYERS, RUNNER, spec_metrics
from parts import medusa, write_head
from test_early_exit import engine_config

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.jump_head import JumpHead

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


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="an exit's slots, in test_invariants.py, are the same there")
def test_jump(engine: Any, prompts: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads under preemption, prefix-cache hits and chunked prefill; each is fed the newest token's embedding
    and the state from which that token was said. Fails if a state is another request's, a rejected draft's or an older
    token's, or if drafts write past their slots.
    """
    fed = []
    states = JumpHead.states

    def recorded(self: JumpHead, early: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        fed.append((early, last))
        return states(self, early, last)

    llm = engine(write_head(tmp_path, 0, NUM_LAYERS - 1, 0.03), **STRESS)
    monkeypatch.setattr(JumpHead, "states", recorded)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected, "the second time from the prefix cache"
    assert spec_metrics(llm)["preemptions"] > 0
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    target = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    assert len(fed) > 50
    for early, last in fed:
        assert torch.equal(target.model.embed_input_ids(target.compute_logits(last).argmax(-1)), early)


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="on the device, in test_simulated_drafts.py")
@pytest.mark.parametrize("kind", ["jump", "medusa"])
def test_behind_a_lookup(engine: Any, prompts: Any, expected: Any, tmp_path: Path, kind: str) -> None:
    """Behind a lookup, which may have begun a draft that it cannot go on with. Fails if it does, from the state of
    the newest token, or if Medusa is asked for more tokens than it has heads.
    """
    is_jump, half = kind == "jump", NUM_LAYERS // 2
    stage = write_head(tmp_path, half, half, 0.0) if is_jump else medusa(tmp_path, num_draft=2)
    del stage["num_speculative_tokens"]
    llm = engine(cascade("auto", stages=(LOOKUP, stage)))
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    lookup, own = stats["stages"].values()
    assert own["drafted"] > 2 * len(prompts) and lookup["drafted"] > lookup["accepted"] and stats["faults"] == {}
    if is_jump:
        assert own["drafted"] - own["accepted"] <= len(prompts), "what stands after a request's last token"
    else:
        assert sum(own["accepted_at"]) == sum(own["accepted_at"][:2]) > 0


def test_refused_under_verify(tmp_path: Path) -> None:
    """Kills: a jump that checks what others drafted."""
    jump = write_head(tmp_path, 0, 1, 0.0)
    del jump["num_speculative_tokens"]
    with pytest.raises(ConfigError, match=r"^cascade: stages\[1\] must be early_exit with policy 'verify'"):
        engine_config(cascade("verify", stages=(LOOKUP, jump)))
