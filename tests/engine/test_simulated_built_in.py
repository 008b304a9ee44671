"""A lookup with a drafter of vLLM on the simulated device: the host reads none of their results within a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import generate
from conftest import ALL, INTERPRETED, graphs

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from eagle_heads import eagle_head, mtp_model, parallel_head
from families import VOCAB_SIZE, checkpoint
from recorded import drafts_pay, replays, runner
from simulated_device.device import Device, simulated_device
from vllm import SamplingParams

from vllm_specplugins.gate.drafter_length import CONTINUED

OTHER, ANY = list(range(10, 60)), list(range(VOCAB_SIZE))  # a prompt that does not repeat, and what may follow it
K, OWN, NUM_TOKENS = 8, 3, 16
LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}
METHODS = ["draft_model", *(["eagle3", "mtp", "eagle", "dflash", "dspark"] if ALL else [])]
LATE = ("mtp", "eagle")  # beside a lookup of which a part arrives from the host
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


def beside(method: str) -> dict[str, Any]:
    first = {"method": "suffix_lookup"} if method in LATE else LOOKUP
    return {"method": "cascade", "num_speculative_tokens": K, "stages": [first, stage(method)]}


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
    llm = engine(beside(method), **{**target(method), **graphs(), **more})
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    if runner(llm).adaptive_verification is not None:
        drafts_pay(llm)
    return llm


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


@pytest.mark.parametrize("method", ["eagle3", *(["draft_model", "dflash", "dspark"] if ALL else [])])
def test_who_copies_needs_no_drafter(engine: Any, device: Device, method: str) -> None:
    """While all requests copy, no drafting step runs. The host learns of it as late as possible. At most two steps
    after a missed match, all requests get drafts. Fails if a copying request stops the drafts of another, if the
    drafter misses tokens of skipped steps, or if it is skipped for longer."""
    llm, least = started(engine, method), int(method not in ("dflash", "dspark"))
    if method.startswith("eagle"):  # else one graph runs all later steps, and a shorter length saves no pass
        recorded = runner(llm).speculator.decode_cudagraph_manager.graphs
        assert {desc.num_speculative_tokens for desc in recorded} == set(range(2, OWN + 1))
    runner(llm).adaptive_verification.set_cost_curves([(1, 1e-6), (8, 1e-6)], [(1, 8.0), (4096, 8.1)])
    known = runner(llm).speculator.specplugins.outcomes._state
    known.shared_tried[1], known.shared_accepted[1] = 1000, 950  # of the drafter, as if it were good
    copied = played(llm, [([5] * 20, [5])] * 2)
    assert all(set(tokens) == {5} for tokens in copied)
    with steps_of(llm) as steps:
        _, answer = played(llm, [([5] * 20, [5]), (OTHER, ANY)])
        assert sum(not step.spared for step in steps) > 2
        steps.clear()
        [again] = played(llm, [(OTHER, ANY)], 52, OTHER[-2:] + answer + [OTHER[0]] * 20)
    assert again[:40] == answer
    assert all((step.runs == least) if step.spared else (step.runs > least) for step in steps), steps
    lost = [step.spared and not step.copies for step in steps]
    in_a_row = [len(list(run)) for is_lost, run in groupby(lost) if is_lost]  # a match is missed twice
    assert sum(step.spared for step in steps) > 2 and 0 < max(in_a_row) <= 2 and not steps[-1].spared, steps


class Step(NamedTuple):
    """Whether the shortest length was chosen, how often the drafter ran, and whether all turn out to copy."""

    spared: bool
    runs: int
    copies: bool


@contextmanager
def steps_of(llm: Any) -> Iterator[list[Step]]:
    """Records the steps from now on; the host's data of the device are one step older."""
    theirs, steps, heard, chosen = runner(llm).speculator, [], [], []
    ours, eager = theirs.specplugins, []
    graphs = [getattr(theirs, f"{kind}_cudagraph_manager", None) for kind in ("prefill", "decode", "query")]
    reports, run, draft_step = ours.outcomes.reports, theirs._run_model, ours._draft_step
    choose = ours.drafter_length
    before = sum(map(replays, graphs))

    def late(slots: Any) -> Any:
        heard.append(reports(slots))
        return heard[-2] if heard[1:] and len(heard[-2]) == len(slots) else heard[-1]

    def length(batch: Any, lengths: Any) -> int:
        chosen.append(choose(batch, lengths))
        return chosen[-1]

    def watched(input_batch: Any, *rest: Any) -> None:
        nonlocal before
        draft_step(input_batch, *rest)
        total = len(eager) + sum(map(replays, graphs))
        gains, rates = reports(input_batch.idx_mapping_np).T
        powers = rates[:, None] ** np.arange(1, OWN + 1)
        most = (powers.cumsum(axis=1) + CONTINUED * powers)[:, 1:].max(axis=1)
        steps.append(Step(chosen[-1] < 2, total - before, bool((gains >= most).all())))
        before = total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.outcomes, "reports", late)
        patch.setattr(ours, "drafter_length", length)
        patch.setattr(theirs, "_run_model", lambda *args, **more: eager.append(0) or run(*args, **more))
        patch.setattr(ours, "_draft_step", watched)
        yield steps


def played(
    llm: Any, cases: list[tuple[list[int], list[int]]], most: int = 40, reference: Any = None
) -> list[list[int]]:
    """Answers to prompts, of some tokens alone."""
    own: dict[str, Any] = {"temperature": 0, "max_tokens": most, "ignore_eos": True, "detokenize": False}
    if reference is not None:
        own["extra_args"] = {"specplugins": {"reference": reference}}
    params = [SamplingParams(allowed_token_ids=allowed, **own) for _, allowed in cases]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in cases], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
