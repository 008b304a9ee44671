"""A lookup beside a drafter of vLLM's on the simulated device: nothing of it is seen on the host within a step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from cases import generate
from conftest import INTERPRETED, graphs

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from eagle_heads import eagle_head, mtp_model, parallel_head
from families import VOCAB_SIZE, checkpoint
from recorded import drafts_pay, replays, runner
from simulated_device.device import Device, simulated_device
from vllm import SamplingParams

ALL = os.environ.get("SPECPLUGINS_SIMULATED") == "all"
K, OWN, NUM_TOKENS = 8, 3, 16
LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}
METHODS = ["draft_model", "eagle3", *(["mtp", "eagle", "dflash", "dspark"] if ALL else [])]
PROMPTS = [[(7 * i + place % (3 + i)) % VOCAB_SIZE for place in range(9 + 8 * i)] for i in range(6)]
QUIET: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256}


def stage(method: str) -> dict[str, Any]:
    own = {"method": method, "num_speculative_tokens": OWN}
    if method == "draft_model":
        return {**own, "model": str(checkpoint("llama"))}
    if method == "mtp":
        return own
    return {**own, "model": str(eagle_head(method) if method.startswith("eagle") else parallel_head(method))}


def target(method: str) -> dict[str, Any]:
    return {"model": str(mtp_model() if method == "mtp" else checkpoint("llama")), **QUIET}


def beside(method: str, **more: Any) -> dict[str, Any]:
    return {"method": "cascade", "num_speculative_tokens": K, "stages": [LOOKUP, stage(method)], **more}


@pytest.fixture(scope="module")
def expected(engine: Any) -> dict[str, list[list[int]]]:
    """By target."""
    return {
        model: generate(engine(**target(method), enforce_eager=True), PROMPTS, [6], max_tokens=NUM_TOKENS)
        for method, model in (("draft_model", "llama"), ("mtp", "mtp"))
    }


@pytest.fixture(scope="module")
def device(engine: Any, expected: Any) -> Iterator[Device]:
    with simulated_device(is_cuda=True) as device:
        yield device
        engine.stop()


def started(engine: Any, method: str, **more: Any) -> Any:
    llm = engine(beside(method), **{**target(method), **graphs((1, 4, 8, 16, 40)), **more})
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    if runner(llm).adaptive_verification is not None:
        drafts_pay(llm)
    return llm


def decodes(llm: Any) -> int:
    """Draft steps that were replayed after the one that takes tokens in."""
    return replays(getattr(runner(llm).speculator, "decode_cudagraph_manager", None))


@pytest.mark.parametrize("method", METHODS)
def test_identity(engine: Any, device: Device, expected: Any, method: str) -> None:
    """Without a wait. Fails if a step reads the device, or if what is verified is not what was drafted."""
    llm, before = started(engine, method), device.ledger.places.total()
    ours = runner(llm).speculator.specplugins
    replayed = replays(ours._graphs_of[0])
    with device.waits_forbidden():
        found = generate(llm, PROMPTS, [6], max_tokens=NUM_TOKENS)
    assert found == expected["mtp" if method == "mtp" else "llama"]
    assert device.ledger.places.total() == before and replays(ours._graphs_of[0]) > replayed
    stats = llm.collective_rpc("specplugins_stats")[0]
    lookup, model = stats["stages"].values()
    assert stats["faults"] == model["faults"] == {} and stats["propose_ms"] == 0
    assert lookup["asked"] > 0 < model["asked"] and model["verified"] > 0
    assert lookup["accepted"] + model["accepted"] == stats["accepted_tokens"] > 0
    assert method != "draft_model" or model["accepted"] == model["verified"], "it is the target"


@pytest.mark.parametrize("method", ["draft_model", "eagle3"] if ALL else ["eagle3"])
def test_who_copies_needs_no_drafter(engine: Any, device: Device, method: str) -> None:
    """While all copy no draft step runs; it does again when they have ceased. Fails if one request's copying stops
    the drafts of another, or if the drafter misses tokens that it was spared."""
    llm = started(engine, method)
    speculator = runner(llm).speculator
    asked: list[int] = []
    take = speculator.specplugins.offers.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            speculator.specplugins.offers, "take", lambda own, *rest: asked.append(own.shape[1]) or take(own, *rest)
        )
        copied = played(llm, [([5] * 20, [5])] * 2)
        before, num_steps = decodes(llm), len(asked)
        assert asked.count(1) > 3 and set(asked) == {1, OWN}, asked
        assert all(set(tokens) == {5} for tokens in copied)
        played(llm, [([5] * 20, [5]), (list(range(10, 60)), list(range(VOCAB_SIZE)))])
        assert asked[num_steps:].count(OWN) > 2 and (method == "draft_model" or decodes(llm) > before)


def played(llm: Any, cases: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Answers to prompts, of some tokens alone."""
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed, detokenize=False)
        for _, allowed in cases
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in cases], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
