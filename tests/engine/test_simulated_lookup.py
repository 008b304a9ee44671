"""Prompt lookup on the simulated device: drafts, and their true lengths, that the host never sees in a step."""

from collections.abc import Iterator
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, TAPES, graphs, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from simulated_device.device import Device, simulated_device

K = PROMPT_LOOKUP["num_speculative_tokens"]
NUM_TOKENS = 16
NO_BIGRAM_TWICE = list(range(10, 60))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    """Of an eager engine without speculation."""
    return generate(engine(enforce_eager=True), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def device(engine: Any, expected: Any) -> Iterator[Device]:
    if TAPES:
        pytest.skip("has a device of its own")
    with simulated_device(is_cuda=True) as device:
        yield device
        engine.stop()


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.fixture
def llm(engine: Any, device: Device) -> Any:
    """Scheduled asynchronously, lengths trimmed on the device; costs of steps as of a device on which drafts pay."""
    llm = engine(PROMPT_LOOKUP, **graphs((1, 4, 8, 16, 40)))
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    runner(llm).adaptive_verification.set_cost_curves([(1, 0.1), (8, 0.1)], [(n, 8 + 0.1 * n) for n in range(1, 4097)])
    return llm


@pytest.fixture
def verified(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each step, how many tokens of each request were verified."""
    manager, lengths = runner(llm).adaptive_verification, []
    reallocate = manager.reallocate_drafts

    def watched(*args: Any) -> Any:
        result = reallocate(*args)
        lengths.append(result[0].diff().tolist())
        return result

    monkeypatch.setattr(manager, "reallocate_drafts", watched)
    return lengths


def test_identity(device: Device, llm: Any, prompts: Any, expected: Any) -> None:
    """Without a wait. Fails if a step reads the device, or what is trimmed is not what was drafted."""
    places = device.ledger.places.total()
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert device.ledger.places.total() == places
    assert spec_metrics(llm)["accepted_tokens"] > 0


def test_nothing_found_costs_one_token(device: Device, llm: Any, verified: list[list[int]]) -> None:
    """From the second step on. Fails if confidences are those of another row, or not 0 behind a draft's end."""
    generate(llm, [NO_BIGRAM_TWICE], [1], max_tokens=4)
    assert verified[1:] and all(lengths == [1] for lengths in verified[1:]), verified
