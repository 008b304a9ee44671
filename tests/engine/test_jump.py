"""Jumps in the engine: exact ones, what they are fed, and outputs that do not depend on them, on both runners."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NUM_TOKENS, STRESS, generate
from conftest import NUM_LAYERS, RUNNER, spec_metrics
from parts import K, medusa, write_head
from test_early_exit import engine_config

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.jump_head import JumpHead


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="an exit's slots, in test_invariants.py, are the same there")
def test_stress(engine: Any, prompts: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_stage(engine: Any, prompts: Any, expected: Any, tmp_path: Path, kind: str) -> None:
    """Behind a lookup, which may have begun a draft that it cannot go on with. Fails if it does, from the state of
    the newest token, or if Medusa is asked for more tokens than it has heads.
    """
    is_jump, half = kind == "jump", NUM_LAYERS // 2
    stage = write_head(tmp_path, half, half, 0.0) if is_jump else medusa(tmp_path, num_draft=2)
    del stage["num_speculative_tokens"]
    stages = [{"method": "prompt_lookup"}, stage]
    config = {"method": "cascade", "num_speculative_tokens": K, "gate": "off", "stages": stages}
    llm = engine(config)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    lookup, own = stats["stages"].values()
    assert own["drafted"] > 50 and lookup["drafted"] > lookup["accepted"] and stats["faults"] == {}
    if is_jump:
        assert own["drafted"] - own["accepted"] <= len(prompts), "what stands after a request's last token"
    else:
        assert sum(own["accepted_at"]) == sum(own["accepted_at"][:2]) > 0


def test_refused_under_verify(tmp_path: Path) -> None:
    """It cannot check what others drafted."""
    jump = write_head(tmp_path, 0, 1, 0.0)
    del jump["num_speculative_tokens"]
    stages = [{"method": "prompt_lookup"}, jump]
    with pytest.raises(ConfigError, match=r"^cascade: stages\[1\] must be early_exit where policy is 'verify'"):
        engine_config({"method": "cascade", "policy": "verify", "stages": stages})
