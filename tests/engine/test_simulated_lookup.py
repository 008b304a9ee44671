"""Prompt lookup on the simulated device: drafts, and their true lengths, that the host never sees in a step."""

import os
from typing import Any

import pytest
import torch
from cases import PROMPT_LOOKUP, generate
from conftest import FEW, INTERPRETED, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from recorded import check_nothing_found_costs_one_token, on_device, replays, runner, verified
from simulated_device.device import Device
from vllm import SamplingParams

ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
needs_all = pytest.mark.skipif(not ALL, reason="SPECPLUGINS_SIMULATED=all")
PROMPTS, NUM_TOKENS = FEW, 16


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
