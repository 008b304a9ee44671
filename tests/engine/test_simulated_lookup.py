"""Prompt lookup on the simulated device: drafts, and their true lengths, that the host never sees in a step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import PROMPT_LOOKUP, generate
from conftest import FEW, INTERPRETED, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import check_nothing_found_costs_one_token, on_device, replays, runner, verified
from simulated_device.device import Device, simulated_device
from vllm import SamplingParams

ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
needs_all = pytest.mark.skipif(not ALL, reason="SPECPLUGINS_SIMULATED=all")
PROMPTS, NUM_TOKENS = FEW, 16
EDITS = {"repetition_penalty": 1.2, "presence_penalty": -0.4, "logit_bias": {7: 2.0, 300: -1.0}}


@pytest.fixture(scope="module")
def expected_details(engine: Any, expected: Any, prompts: Any) -> list[Any]:
    return details(engine(enforce_eager=True), prompts) if ALL else []


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
    return on_device(engine, PROMPT_LOOKUP, token_ms=0.1)


def test_identity(device: Device, llm: Any, prompts: Any, expected: Any) -> None:
    """Without a wait, by replays. Fails if a step reads the device, or if what is verified is not what was drafted."""
    places, graphs = device.ledger.places.total(), runner(llm).speculator._graphs
    before = replays(graphs)
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert device.ledger.places.total() == places and replays(graphs) > before
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]


def test_nothing_found_costs_one_token(llm: Any) -> None:
    """Fails if confidences are those of another row, or not 0 after a draft's end."""
    check_nothing_found_costs_one_token(llm)


def test_any_confidence(llm: Any, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimmed at random. Fails if verification takes a draft's scheduled length for its true one."""
    manager, rng = runner(llm).adaptive_verification, torch.Generator().manual_seed(1)
    newest = runner(llm).speculator.outcomes.confidences.newest
    monkeypatch.setattr(manager, "record_confidences", lambda *_: newest.uniform_(generator=rng))
    with verified(llm) as steps:
        assert generate(llm, prompts[:4], [4], max_tokens=NUM_TOKENS) == expected[:4]
    assert any(len(set(lengths.values())) > 2 for lengths in steps), steps


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
    assert texts.num_bytes() == 0 and not texts._digests
