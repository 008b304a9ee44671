"""A cascade of a lookup and an exit on the simulated device: nothing of it is seen on the host within a step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from cases import generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, graphs

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import drafts_pay, replays, runner
from simulated_device.device import Device, simulated_device

ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
K, NUM_TOKENS = 4, 16
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": NUM_LAYERS}]
CASES = [
    ("first", "greedy"),
    ("verify", "greedy"),
    *([("extend", "greedy"), ("first", "probabilistic")] if ALL else []),
]


def cascade(policy: str, **exit_options: Any) -> dict[str, Any]:
    """All layers of the target are the exit: what it says is accepted."""
    stages = [STAGES[0], {**STAGES[1], **exit_options}]
    return {"method": "cascade", "policy": policy, "stages": stages, "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    """Of an eager engine without speculation."""
    return generate(engine(enforce_eager=True), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def device(engine: Any, expected: Any) -> Iterator[Device]:
    with simulated_device(is_cuda=True) as device:
        yield device
        engine.stop()


def on_device(engine: Any, config: dict[str, Any]) -> Any:
    """Scheduled asynchronously, lengths trimmed on the device; costs of steps as of a device on which drafts pay."""
    llm = engine(config, **graphs((1, 4, 8, 16, 40)))
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    drafts_pay(llm)
    return llm


@pytest.mark.parametrize(("policy", "method"), CASES)
def test_identity(engine: Any, device: Device, prompts: Any, expected: Any, policy: str, method: str) -> None:
    """Without a wait, by replays. Fails if a step reads the device, if an exit's tokens stand behind another's, or if
    a stage is told what became of the other's tokens."""
    llm = on_device(engine, cascade(policy, draft_sample_method=method))
    own, targets = runner(llm).speculator._graphs, runner(llm).cudagraph_manager
    before, steps = (replays(own), replays(targets)), device.ledger.serving.steps
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    num_decoded = device.ledger.serving.steps - steps - 1  # all but the step of the prompts
    assert replays(own) - before[0] >= 0.95 * num_decoded and replays(targets) - before[1] >= 0.95 * num_decoded
    stats = llm.collective_rpc("specplugins_stats")[0]
    lookup, exit_stage = stats["stages"].values()
    assert stats["faults"] == {} and stats["propose_ms"] == 0
    assert 0 < exit_stage["accepted"] == exit_stage["verified"]
    assert lookup["asked"] > 0 and lookup["accepted"] + exit_stage["accepted"] == stats["accepted_tokens"]


def test_an_exit_that_costs_too_much(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Its layers are not run at all. Fails if a graph of the exit is replayed, or if lookups stop with it."""
    llm = on_device(engine, cascade("first", draft_sample_method="greedy"))
    generate(llm, prompts[:2], [2], max_tokens=4)
    runner(llm).adaptive_verification.set_cost_curves([(1, 1e4), (8, 1e4)], [(n, 8 + 0.1 * n) for n in range(1, 4097)])
    speculator = runner(llm).speculator
    before = replays(speculator._graphs), replays(speculator._shallow)
    drafted = llm.collective_rpc("specplugins_stats")[0]["stages"]["0 prompt_lookup"]["drafted"]
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert replays(speculator._graphs) == before[0] and replays(speculator._shallow) > before[1]
    assert llm.collective_rpc("specplugins_stats")[0]["stages"]["0 prompt_lookup"]["drafted"] > drafted


@pytest.mark.skipif(not ALL, reason="SPECPLUGINS_SIMULATED=all runs it")
def test_stages_of_a_request(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Fails if a stage drafts for a request that does not allow it."""
    from vllm import SamplingParams

    llm = on_device(engine, cascade("first", draft_sample_method="greedy"))
    before = llm.collective_rpc("specplugins_stats")[0]["stages"]
    options = {"specplugins": {"stages": ["prompt_lookup"]}}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    after = llm.collective_rpc("specplugins_stats")[0]["stages"]
    drafted = [after[name]["drafted"] - before[name]["drafted"] for name in after]
    assert drafted[0] > 0 == drafted[1]
