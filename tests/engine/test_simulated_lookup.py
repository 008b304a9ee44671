"""Prompt lookup on the simulated device: drafts, and their true lengths, that the host never sees in a step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, graphs, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import drafts_pay, replays, runner
from simulated_device.device import Device, simulated_device
from vllm import SamplingParams

needs_all = pytest.mark.skipif(os.environ.get("SPECPLUGINS_SIMULATED") != "all", reason="SPECPLUGINS_SIMULATED=all")
NUM_TOKENS = 16
NO_BIGRAM_TWICE = list(range(10, 60))
EDITS = {"repetition_penalty": 1.2, "presence_penalty": -0.4, "logit_bias": {7: 2.0, 300: -1.0}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    """Of an eager engine without speculation."""
    return generate(engine(enforce_eager=True), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def expected_details(engine: Any, expected: Any, prompts: Any) -> list[Any]:
    return details(engine(enforce_eager=True), prompts)


@pytest.fixture(scope="module")
def device(engine: Any, expected_details: Any) -> Iterator[Device]:
    with simulated_device(is_cuda=True) as device:
        yield device
        engine.stop()


def details(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Tokens and all kinds of logprobs, of logits that are edited for every second request."""
    own = {"logprobs": 2, "prompt_logprobs": 1}, {"logprob_token_ids": [5, 6]}
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **own[i // 2 % 2], **(EDITS if i % 2 else {}))
        for i in range(len(prompts))
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def flat(logprobs: Any) -> list[tuple[int, float]]:
    """(token, logprob) of each place, by token."""
    places = [sorted((token, entry.logprob) for token, entry in place.items()) for place in logprobs or [] if place]
    return [pair for place in places for pair in place]


@pytest.fixture
def llm(engine: Any, device: Device) -> Any:
    """Scheduled asynchronously, lengths trimmed on the device; costs of steps as of a device on which drafts pay."""
    llm = engine(PROMPT_LOOKUP, **graphs((1, 4, 8, 16, 40)))
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    drafts_pay(llm, token_ms=0.1)
    return llm


@pytest.fixture
def verified(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Of each step, how many tokens of each request were verified."""
    manager, lengths = runner(llm).adaptive_verification, []
    reallocate = manager.reallocate_drafts

    def watched(request_ids: list[str], *args: Any) -> Any:
        result = reallocate(request_ids, *args)
        lengths.append(dict(zip(request_ids, result[0].diff().tolist(), strict=True)))
        return result

    monkeypatch.setattr(manager, "reallocate_drafts", watched)
    return lengths


def test_identity(device: Device, llm: Any, prompts: Any, expected: Any) -> None:
    """Without a wait, by replays. Fails if a step reads the device, or if what is verified is not what was drafted."""
    places, graphs = device.ledger.places.total(), runner(llm).speculator._graphs
    before = replays(graphs)
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert device.ledger.places.total() == places and replays(graphs) > before
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]


def test_nothing_found_costs_one_token(llm: Any, verified: list[dict[str, int]]) -> None:
    """From the second step on, beside a request for which much is found.

    Fails if confidences are those of another row, or not 0 behind a draft's end.
    """
    prompts = [{"prompt_token_ids": tokens} for tokens in (NO_BIGRAM_TWICE, [5] * 20)]
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **own) for most, own in (
        (4, {"allowed_token_ids": [100, 101, 102]}), (16, {"allowed_token_ids": [5]}))]  # fmt: skip
    llm.generate(prompts, params, use_tqdm=False)
    both = [lengths for lengths in verified if len(lengths) == 2][:2]  # later it may repeat itself
    first = min(both[0], key=lambda name: int(name.split("-")[0]))
    assert len(both) >= 2 and all(lengths[first] == 1 for lengths in both[1:]), both
    assert any(max(lengths.values()) > 1 for lengths in both[1:]), both


def test_any_confidence(
    llm: Any, prompts: Any, expected: Any, verified: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimmed at random. Fails if verification takes a draft's scheduled length for its true one."""
    manager, rng = runner(llm).adaptive_verification, torch.Generator().manual_seed(1)
    newest = runner(llm).speculator.outcomes.confidences.newest
    monkeypatch.setattr(manager, "record_confidences", lambda *_: newest.uniform_(generator=rng))
    assert generate(llm, prompts[:4], [4], max_tokens=NUM_TOKENS) == expected[:4]
    assert any(len(set(lengths.values())) > 2 for lengths in verified), verified


@needs_all
def test_logprobs_and_edits(llm: Any, prompts: Any, expected_details: Any) -> None:
    """Fails if logprobs, those of asked tokens or penalties are taken by the boundaries that the host knows."""
    for found, plain in zip(details(llm, prompts), expected_details, strict=True):
        mine, theirs = found.outputs[0], plain.outputs[0]
        assert list(mine.token_ids) == list(theirs.token_ids)
        for ours, own in ((mine.logprobs, theirs.logprobs), (found.prompt_logprobs, plain.prompt_logprobs)):
            assert [token for token, _ in flat(ours)] == [token for token, _ in flat(own)]
            assert [p for _, p in flat(ours)] == pytest.approx([p for _, p in flat(own)], abs=1e-3)


@needs_all
def test_references(llm: Any, prompts: Any, expected: Any) -> None:
    """Two requests share one, a third has its own, a fourth none; they come and go. Fails if a reference is another's,
    or is not given back."""
    texts, asked = runner(llm).speculator.texts, []
    order = [0, 0, 2, 3]
    for i, tokens in zip(order, (expected[0], expected[0], expected[2], None), strict=True):
        options = {} if tokens is None else {"specplugins": {"reference": [*prompts[i][-3:], *tokens]}}
        asked.append(SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=options))
    before = spec_metrics(llm)["accepted_tokens"]
    outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in order], asked, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected[i] for i in order]
    assert spec_metrics(llm)["accepted_tokens"] - before >= 3 * 6
    generate(llm, prompts[:1], [1], max_tokens=2)
    assert texts.num_bytes() == 0 and texts.references is None
