"""A cascade of a lookup and an exit on the simulated device: nothing of it is seen on the host within a step."""

import os
from typing import Any

import pytest
from cases import generate
from conftest import FEW, INTERPRETED, NUM_LAYERS

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import check_nothing_found_costs_one_token, on_device, replays, runner
from simulated_device.device import Device

ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
K, PROMPTS, NUM_TOKENS = 4, FEW, 16
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": NUM_LAYERS}]
CASES = [("auto", "greedy"), ("verify", "greedy"), *([("auto", "probabilistic")] if ALL else [])]


def cascade(policy: str, **exit_options: Any) -> dict[str, Any]:
    """All layers of the target are the exit: what it says is accepted."""
    stages = [STAGES[0], {**STAGES[1], **exit_options}]
    return {"method": "cascade", "policy": policy, "stages": stages, "num_speculative_tokens": K}


def drafted(llm: Any) -> dict[int, int]:
    """Steps that were replayed, by how many tokens the exit drafted."""
    return {depth: replays(own) for depth, own in runner(llm).speculator._graphs_of.items()}


@pytest.mark.parametrize(("policy", "method"), CASES)
def test_identity(engine: Any, device: Device, prompts: Any, expected: Any, policy: str, method: str) -> None:
    """Without a wait, by replays. Fails if a step reads the device, if an exit's tokens stand behind another's, or if
    a stage is told what became of the other's tokens."""
    llm = on_device(engine, cascade(policy, draft_sample_method=method))
    before, steps = (drafted(llm), replays(runner(llm).cudagraph_manager)), device.ledger.num_steps
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    num_decoded = device.ledger.num_steps - steps - 1  # all but the step of the prompts
    assert sum(drafted(llm).values()) - sum(before[0].values()) >= 0.95 * num_decoded
    assert replays(runner(llm).cudagraph_manager) - before[1] >= 0.95 * num_decoded
    stats = llm.collective_rpc("specplugins_stats")[0]
    lookup, exit_stage = stats["stages"].values()
    assert stats["faults"] == {} and stats["propose_ms"] == 0
    assert 0 < exit_stage["accepted"] == exit_stage["verified"]
    assert lookup["asked"] > 0 and lookup["accepted"] + exit_stage["accepted"] == stats["accepted_tokens"]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_an_exit_as_deep_as_is_asked(engine: Any, device: Device, prompts: Any, expected: Any, most: int) -> None:
    """Fails if there is no graph of that depth, if another's is replayed, or if its layers run for no drafts."""
    llm = on_device(engine, cascade("auto", draft_sample_method="greedy"))
    generate(llm, prompts[:2], [2], max_tokens=4)
    before, scheduler = drafted(llm), llm.llm_engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "dynamic_sd_lookup", [most] * 100)
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert {own for own, count in drafted(llm).items() if count > before[own]} <= {0, most}
    assert most == 0 or drafted(llm)[most] > before[most]


def test_nothing_found_costs_one_token(engine: Any, device: Device) -> None:
    """Of a request that does not allow the exit. Fails if confidences are those of another row, or not 0 after a
    draft's end."""
    llm = on_device(engine, cascade("auto", draft_sample_method="greedy"), token_ms=0.1)
    check_nothing_found_costs_one_token(llm, specplugins={"stages": ["prompt_lookup"]})
