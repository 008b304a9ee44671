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
    ("auto", "greedy"),
    ("verify", "greedy"),
    *([("auto", "probabilistic")] if ALL else []),
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


def drafted(llm: Any) -> dict[int, int]:
    """Steps that were replayed, by how many tokens the exit drafted."""
    totals: dict[int, int] = {}
    for (_, depth), own in runner(llm).speculator._graphs_of.items():
        totals[depth] = totals.get(depth, 0) + replays(own)
    return totals


@pytest.mark.parametrize(("policy", "method"), CASES)
def test_identity(engine: Any, device: Device, prompts: Any, expected: Any, policy: str, method: str) -> None:
    """Without a wait, by replays. Fails if a step reads the device, if an exit's tokens stand behind another's, or if
    a stage is told what became of the other's tokens."""
    llm = on_device(engine, cascade(policy, draft_sample_method=method))
    before, steps = (drafted(llm), replays(runner(llm).cudagraph_manager)), device.ledger.serving.steps
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    num_decoded = device.ledger.serving.steps - steps - 1  # all but the step of the prompts
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


def test_a_layer_chosen_while_serving(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Where all layers, which are always right, cost what one does, the exit goes over to all, to graphs of their own,
    without a wait. Fails if a look reads the device, or another place, or if a graph of another layer is replayed."""
    llm = on_device(engine, cascade("auto", exit_layer=[1, NUM_LAYERS]))
    speculator = runner(llm).speculator
    choice, speculator._layers._shares[:] = speculator._exit.chosen.choice, 0.1
    with device.waits_forbidden():
        for _ in range(2):
            before = {layer: replays(speculator._graphs_of[layer, K]) for layer in choice.layers}
            assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert choice.layer == NUM_LAYERS and choice.counts[1, 0].sum() <= 1 < choice.counts[0, 0].sum()
    assert replays(speculator._graphs_of[1, K]) == before[1]
    assert replays(speculator._graphs_of[NUM_LAYERS, K]) > before[NUM_LAYERS]
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_nothing_found_costs_one_token(engine: Any, device: Device) -> None:
    """Of a request that does not allow the exit, from its second step on, beside one that is drafted for.

    Fails if confidences are those of another row, or not 0 behind a draft's end.
    """
    from vllm import SamplingParams

    llm = on_device(engine, cascade("auto", draft_sample_method="greedy"))
    manager, lengths = runner(llm).adaptive_verification, []
    drafts_pay(llm, token_ms=0.1)
    prompts = [{"prompt_token_ids": tokens} for tokens in (list(range(10, 60)), [5] * 20)]
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **own) for most, own in (
        (4, {"allowed_token_ids": [100, 101, 102], "extra_args": {"specplugins": {"stages": ["prompt_lookup"]}}}),
        (16, {"allowed_token_ids": [5]}))]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        reallocate = manager.reallocate_drafts

        def watched(request_ids: list[str], *args: Any) -> Any:
            result = reallocate(request_ids, *args)
            lengths.append(dict(zip(request_ids, result[0].diff().tolist(), strict=True)))
            return result

        patch.setattr(manager, "reallocate_drafts", watched)
        llm.generate(prompts, params, use_tqdm=False)
    both = [own for own in lengths if len(own) == 2][:2]  # later it may repeat itself
    first = min(both[0], key=lambda name: int(name.split("-")[0]))
    assert len(both) >= 2 and all(own[first] == 1 for own in both[1:]), both
    assert any(max(own.values()) > 1 for own in both[1:]), both


@pytest.mark.skipif(not ALL, reason="SPECPLUGINS_SIMULATED=all runs it")
def test_stages_of_a_request(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Fails if a stage drafts for a request that does not allow it."""
    from vllm import SamplingParams

    llm = on_device(engine, cascade("auto", draft_sample_method="greedy"))
    before = llm.collective_rpc("specplugins_stats")[0]["stages"]
    options = {"specplugins": {"stages": ["prompt_lookup"]}}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    after = llm.collective_rpc("specplugins_stats")[0]["stages"]
    lookup, exit_stage = (after[name]["drafted"] - before[name]["drafted"] for name in after)
    assert lookup > 0 == exit_stage
