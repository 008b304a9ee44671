"""vLLM's engine on the simulated device: what is replayed says what eager steps say, and planted mistakes are seen."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import early_exit, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, graphs, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import drafts_pay, recapture, replays, runner
from simulated_device.device import Device
from simulated_device.guard import DeviceError
from simulated_device.tape import CaptureError

NUM_TOKENS = 13  # one from the prompt and three whole steps of K + 1
K = 3
DRAFT_MODEL = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": K}
ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
SIZES = (1, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 9)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    """Of an eager engine without speculation."""
    return generate(engine(enforce_eager=True), prompts, [8], max_tokens=NUM_TOKENS)


def test_vllm_alone(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Kills: an operation that a tape forgets, a tensor that a replay reads where it no longer is."""
    config = {**graphs((1, 4, 8))["compilation_config"], "cudagraph_mode": "FULL"}
    llm = engine(enforce_eager=False, compilation_config=config)
    with device.waits_forbidden():
        assert generate(llm, prompts, [3, 6], max_tokens=NUM_TOKENS) == expected
    assert replays(runner(llm).cudagraph_manager) >= 2 * (NUM_TOKENS - 1)


def test_vllms_own_draft_model(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """vLLM 0.32 has no graphs for drafting with it."""
    llm = engine(DRAFT_MODEL, **graphs((4, 16)))
    assert generate(llm, prompts, [3, 6], max_tokens=NUM_TOKENS) == expected
    assert replays(runner(llm).cudagraph_manager) > 0


@pytest.mark.skipif(not ALL, reason="SPECPLUGINS_SIMULATED=all runs it")
def test_lengths_that_only_the_device_knows(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """vLLM's adaptive verification: graphs of variable lengths, which it chooses on the device."""
    llm = engine({**DRAFT_MODEL, "enable_adaptive_verification": True}, **graphs((4, 16)), async_scheduling=True)
    manager, verified = runner(llm).adaptive_verification, []
    manager.set_cost_curves([(1, 0.2), (8, 0.2)], [(n, 1 + 0.25 * n) for n in range(1, 4097)])  # for times measured
    reallocate = manager.reallocate_drafts

    def watched(*args: Any) -> Any:
        result = reallocate(*args)
        verified.append(set(result[0].diff().tolist()))
        return result

    manager.reallocate_drafts = watched
    assert generate(llm, prompts[:3], [3], max_tokens=2 * NUM_TOKENS)[0][:NUM_TOKENS] == expected[0]
    assert any(len(lengths) > 1 for lengths in verified)
    assert replays(runner(llm).cudagraph_manager) > 0


@pytest.fixture
def all_layers(engine: Any, device: Device) -> Any:
    llm = engine(early_exit(NUM_LAYERS, K), **graphs(SIZES))
    drafts_pay(llm)
    return llm


def drafts(llm: Any, prompts: Any, batch_size: int) -> tuple[list[list[int]], int, int]:
    """Outputs, and how many tokens were drafted and accepted."""
    before = spec_metrics(llm)
    tokens = generate(llm, prompts, [batch_size], max_tokens=NUM_TOKENS)
    after = spec_metrics(llm)
    drafted, accepted = (int(after[name] - before[name]) for name in ("draft_tokens", "accepted_tokens"))
    return tokens, drafted, accepted


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_all_layers(device: Device, all_layers: Any, prompts: Any, expected: Any, batch_size: int) -> None:
    """Every draft is accepted, by replays alone, without a wait; most batches have padding rows. Kills: a buffer that a
    graph does not read where the step wrote it; rows of padding that write to a request's cache.
    """
    speculator = runner(all_layers).speculator
    before, places = replays(speculator._graphs), device.ledger.places.total()
    few = prompts[:batch_size]
    with device.waits_forbidden():
        tokens, drafted, accepted = drafts(all_layers, few, batch_size)
    assert tokens == expected[:batch_size] and drafted == accepted == 9 * batch_size
    assert replays(speculator._graphs) >= before + 3 and device.ledger.places.total() == places
    stats = all_layers.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and stats["propose_ms"] == 0, "drafting eagerly takes time"


@pytest.fixture
def planted(device: Device, all_layers: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """planted(function of the target): the drafting graphs with it before `EarlyExit.draft_steps`; mended when the
    test is over."""
    speculator = runner(all_layers).speculator
    proposer = speculator.barrier.proposer
    replaced = []

    def plant(mistake: Any) -> None:
        original = type(proposer).draft_steps
        replaced.append(True)
        monkeypatch.setattr(
            type(proposer),
            "draft_steps",
            lambda self, target, *args, **options: mistake(target) or original(self, target, *args, **options),
        )
        recapture(device, speculator)

    yield plant
    monkeypatch.undo()
    if replaced:
        recapture(device, speculator)


def test_a_buffer_that_moves(all_layers: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is allocated anew between capture and replay."""
    speculator = runner(all_layers).speculator
    states = speculator._req_states
    monkeypatch.setattr(states, "last_sampled_tokens", states.last_sampled_tokens.clone())
    _, drafted, accepted = drafts(all_layers, prompts[:3], 3)
    assert accepted < drafted / 2


def test_a_branch_on_a_length(planted: Any, all_layers: Any, prompts: Any) -> None:
    """Python that knows a length: the graph takes the branch of its capture for ever."""

    def branch(target: Any) -> None:
        lengths.append(len(target.num_tokens))
        if len(lengths) <= captures:  # while recording
            target.last_token_ids.zero_()

    lengths: list[int] = []
    captures = 100
    planted(branch)
    captures = len(lengths)  # from now on the branch is not taken, says Python
    _, drafted, accepted = drafts(all_layers, prompts[:3], 3)
    assert len(lengths) == captures and accepted < drafted / 2


def test_a_host_value_in_a_graph(planted: Any, all_layers: Any, prompts: Any) -> None:
    def fixed(target: Any) -> None:
        target.num_tokens.fill_(longest)  # right for as long as it is

    longest = 7
    planted(fixed)
    longest = len(prompts[2]) + 1
    _, drafted, accepted = drafts(all_layers, prompts[2:3], 1)
    assert accepted < drafted / 2


def test_a_hidden_item_in_a_graph(planted: Any) -> None:
    with pytest.raises(CaptureError, match="reads from the device"):
        planted(lambda target: target.num_tokens[0].item() < 0)


def test_a_hidden_item_in_a_step(
    device: Device, all_layers: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that waits is named."""
    speculator = runner(all_layers).speculator
    begin, seen = speculator.outcomes.begin, []

    def waiting(num_reqs: int, idx_mapping: torch.Tensor, *args: Any) -> None:
        try:
            seen.append(idx_mapping[0].item())
        except DeviceError as error:
            seen.append(str(error))
        begin(num_reqs, idx_mapping, *args)

    monkeypatch.setattr(speculator.outcomes, "begin", waiting)
    with device.waits_forbidden():
        drafts(all_layers, prompts[:1], 1)
    assert seen and all("test_simulated_engines.py" in str(entry) for entry in seen)


def test_all_layers_asynchronously(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """The same with sampled drafts, q = p: all are accepted, one step or none is planned in vain."""
    config = {**early_exit(NUM_LAYERS, K), "draft_sample_method": "probabilistic"}
    llm = engine(config, **graphs(SIZES), async_scheduling=True)
    drafts_pay(llm)
    with device.waits_forbidden():
        assert generate(llm, prompts[:6], [6], max_tokens=NUM_TOKENS) == expected[:6]
    before = spec_metrics(llm)
    with device.waits_forbidden():
        generate(llm, prompts[:6], [6], max_tokens=NUM_TOKENS, temperature=1.0)
    after = spec_metrics(llm)
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert drafted >= 54 and accepted >= drafted - 6 * K
    assert replays(runner(llm).speculator._graphs) > 0
