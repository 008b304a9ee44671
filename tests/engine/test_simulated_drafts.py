"""Lookups on the simulated device, alone or with a proposer that runs the target: the host reads no value within a
step."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, generate, num_dropped, progress
from conftest import FEW, INTERPRETED, NUM_LAYERS, graphs, long, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from parts import learner_of, learning, medusa, swaps_weights, with_embeddings, write_head
from recorded import check_nothing_found_costs_one_token, on_device, replays, runner, verified
from shortened import new_folder
from simulated_device.device import Device
from simulated_device.references import patch_verification
from simulated_device.tape import recording
from vllm import SamplingParams

from vllm_specplugins.engine.target.layers import FirstLayers

K, PROMPTS, NUM_TOKENS = 4, FEW, 16
# All layers of the target: what these say is accepted, but for Medusa's, and of one pass the tokens after the first.
EXIT = {"method": "early_exit", "exit_layer": NUM_LAYERS}
JUMP = write_head(new_folder("jump"), NUM_LAYERS // 2, NUM_LAYERS // 2, 0.0)
MEDUSA = medusa(new_folder("medusa"), num_draft=2)
AHEAD = with_embeddings(new_folder("ahead"), NUM_LAYERS, K)
LOOKUPS = [PROMPT_LOOKUP, SUFFIX_LOOKUP]  # the latter with what arrives from the host
SHORT = {"num_speculative_tokens": 2}  # graphs of three depths
CASCADES = [("verify", EXIT, "greedy"), ("auto", EXIT | SHORT, "greedy")]
CASCADES[:0] = [long("auto", stage, "greedy") for stage in (JUMP | SHORT, MEDUSA, AHEAD)]
CASCADES[:0] = [long("auto", stage, "probabilistic") for stage in (EXIT, JUMP, MEDUSA)]
CASCADES[:0] = [long("auto", EXIT | SHORT, "coupled")]


@pytest.fixture(scope="module", autouse=True)
def by_reference() -> Iterator[None]:
    """Other files of the device's verify by kernels."""
    with pytest.MonkeyPatch.context() as patches:
        patch_verification(patches)
        yield


def cascade(policy: str, stage: dict[str, Any], first: str = "prompt_lookup", **options: Any) -> dict[str, Any]:
    stages = [{"method": first}, {**stage, **options}]
    return {"method": "cascade", "policy": policy, "stages": stages, "num_speculative_tokens": K}


AUTO = cascade("auto", EXIT | SHORT, draft_sample_method="greedy")


def drafted(llm: Any) -> dict[int, int]:
    """Steps that were replayed, by how many tokens the second stage drafted."""
    return {depth: replays(own) for depth, own in runner(llm).speculator._graphs_of.items()}


@pytest.mark.parametrize("stage", [EXIT | SHORT | {"exit_layer": 1}, long(JUMP), long(MEDUSA)])
def test_earlier_outputs_beside(
    engine: Any, device: Device, prompts: Any, expected: Any, stage: dict[str, Any]
) -> None:
    """What arrives from the host, without a wait. Fails if it is not asked, or if its drafts are of another request."""
    llm = on_device(engine, cascade("auto", stage, "suffix_lookup", draft_sample_method="greedy"))
    before, accepted = drafted(llm), [0]
    for _ in range(2):
        with device.waits_forbidden():
            assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
        llm.collective_rpc("specplugins_store")
        stats = llm.collective_rpc("specplugins_stats")[0]
        lookup, model = stats["stages"].values()
        accepted.append(lookup["accepted"])
    assert sum(drafted(llm).values()) > sum(before.values())
    assert accepted[2] - accepted[1] > accepted[1] + 8, "what was said before is known"
    assert stats["faults"] == lookup["faults"] == {} and stats["propose_ms"] == 0 and model["verified"] > 0


@pytest.mark.parametrize(("policy", "stage", "method"), CASCADES)
def test_cascade(
    engine: Any, device: Device, prompts: Any, expected: Any, policy: str, stage: dict[str, Any], method: str
) -> None:
    """Without a wait, by replays. Fails if a step reads the device, if an exit's tokens stand behind another's, if a
    jump's stand behind a lookup's, or if a stage is told what became of the other's tokens."""
    llm = on_device(engine, cascade(policy, stage, draft_sample_method=method))
    before, steps = (drafted(llm), replays(runner(llm).cudagraph_manager)), device.ledger.num_steps
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    num_decoded = device.ledger.num_steps - steps - 1  # all but the step of the prompts
    assert sum(drafted(llm).values()) - sum(before[0].values()) >= 0.95 * num_decoded
    assert replays(runner(llm).cudagraph_manager) - before[1] >= 0.95 * num_decoded
    progress(llm)  # the worker hears of what was dropped
    stats = llm.collective_rpc("specplugins_stats")[0]
    lookup, exit_stage = stats["stages"].values()
    assert stats["faults"] == {} and stats["propose_ms"] == 0
    # All is right. The scheduler drops what passes a request's end, and the draft of the step that it had planned then.
    in_vain = num_dropped(llm)
    assert stage in (MEDUSA, AHEAD) or exit_stage["verified"] - in_vain == exit_stage["accepted"] > 0
    assert lookup["asked"] > 0 and lookup["accepted"] + exit_stage["accepted"] == stats["accepted_tokens"]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_an_exit_as_deep_as_is_asked(engine: Any, device: Device, prompts: Any, expected: Any, most: int) -> None:
    """Fails if there is no graph of that depth, if another's is replayed, or if its layers run for no drafts."""
    llm = on_device(engine, AUTO)
    generate(llm, prompts[:2], [2], max_tokens=4)
    before, scheduler = drafted(llm), llm.llm_engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "dynamic_sd_lookup", [most] * 100)
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert {own for own, count in drafted(llm).items() if count > before[own]} <= {0, most}
    assert most == 0 or drafted(llm)[most] > before[most]


def test_launches_beside_an_exit(engine: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the launches of a graph in addition to the target's layers. Fails if a step, or a draft token of the exit,
    takes more launches than today."""
    llm = on_device(engine, AUTO)
    speculator, of_layers, call = runner(llm).speculator, Counter[Any](), FirstLayers.__call__

    def counted(*arguments: Any, **options: Any) -> Any:
        graph = recording()
        before = 0 if graph is None else graph.contents.total()
        states = call(*arguments, **options)
        of_layers[graph] += 0 if graph is None else graph.contents.total() - before
        return states

    monkeypatch.setattr(FirstLayers, "__call__", counted)
    monkeypatch.setattr(speculator, "_graphs_of", {})
    monkeypatch.setattr(speculator, "_step_counts", (0, 1, 2))
    with device.guard.active():
        speculator.init_cudagraph_manager(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
        for manager in speculator._graphs_of.values():
            for sizes in manager._capture_descs.values():
                del sizes[1:]  # one has as many as another
        speculator.capture()
    for depth, manager in speculator._graphs_of.items():
        for graph in manager.graphs.values():
            assert (of_layers[graph] > 0) == (depth > 0)
            assert graph.contents.total() - of_layers[graph] <= 24 + 32 * depth, graph.contents


def test_who_copies_needs_no_exit(engine: Any, device: Device) -> None:
    """While all copy more than it would draft, no step of it runs; it does for all where one request does not."""
    llm = on_device(engine, AUTO)
    known = runner(llm).speculator.outcomes._state
    for counts, lookup, own in ((known.shared_tried, 100, 100), (known.shared_accepted, 99, 1)):
        counts[0], counts[1] = lookup, own

    def spared(*allowed: list[int], most: int) -> int:
        before = drafted(llm)[0]
        own: dict[str, Any] = {"temperature": 0, "max_tokens": most, "ignore_eos": True}
        params = [SamplingParams(allowed_token_ids=tokens, **own) for tokens in allowed]
        llm.generate(
            [{"prompt_token_ids": [5] * 20}, {"prompt_token_ids": list(range(10, 60))}], params, use_tqdm=False
        )
        return drafted(llm)[0] - before

    assert spared([5], [5], most=60) > 4
    assert spared([5], list(range(100, 300)), most=8) <= 1


def test_nothing_found_beside_an_exit(engine: Any, device: Device) -> None:
    """Of a request that does not allow the exit. Fails if confidences are those of another row, or not 0 after a
    draft's end."""
    allowed = {"specplugins": {"stages": ["prompt_lookup"]}}
    check_nothing_found_costs_one_token(on_device(engine, AUTO, token_ms=0.1), **allowed)


@pytest.mark.usefixtures("whole_drafts")
@pytest.mark.parametrize("method", ["jump", long("early_exit"), long("medusa")])
def test_a_part_that_learns(
    engine: Any, device: Device, prompts: Any, expected: Any, method: str, tmp_path: Path
) -> None:
    """Without a wait, by replays, with new weights before every other step. Fails if what is read waits for the device
    or for the host, or if new weights are not those that a graph was recorded with."""
    llm = engine(learning(tmp_path, method), **graphs())
    learner, graphs_of = learner_of(llm), runner(llm).speculator._graphs_of
    own = graphs_of[max(graphs_of)]
    before = replays(own)
    with pytest.MonkeyPatch.context() as patch, device.waits_forbidden():
        num_steps = swaps_weights(patch)
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert replays(own) - before >= num_steps[0] - 2 > 8
    learner._take_in()
    assert learner.counts()["examples"] >= len(prompts) * NUM_TOKENS * (1 if method == "jump" else 0.7)


@pytest.fixture(scope="module", params=LOOKUPS, ids=lambda config: config["method"])
def llm(engine: Any, device: Device, request: pytest.FixtureRequest) -> Any:
    return on_device(engine, request.param, token_ms=0.1)


def test_lookup(device: Device, llm: Any, prompts: Any, expected: Any) -> None:
    """Without a wait, by replays. Fails if a step reads the device, or if what is verified is not what was drafted."""
    places, graphs = device.ledger.places.total(), runner(llm).speculator._graphs
    before = replays(graphs)
    with device.waits_forbidden():
        assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert device.ledger.places.total() == places and replays(graphs) > before
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]


def test_nothing_found_costs_one_token(llm: Any) -> None:
    """The same of a lookup alone."""
    check_nothing_found_costs_one_token(llm)


def test_launches(llm: Any) -> None:
    """Counts the launches of a lookup's graph of any size, with and without a store. Fails if a step takes more
    launches than today."""
    alone = runner(llm).speculator.lookups.late is None
    for graph in runner(llm).speculator._graphs_of[0].graphs.values():
        assert graph.contents.total() <= (11 if alone else 43), graph.contents


def test_any_confidence(llm: Any, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimmed at random. Fails if verification takes a draft's scheduled length for its true one."""
    manager, rng = runner(llm).adaptive_verification, torch.Generator().manual_seed(1)
    newest = runner(llm).speculator.outcomes.shared_probs.newest
    monkeypatch.setattr(manager, "record_confidences", lambda *_: newest.uniform_(generator=rng))
    with verified(llm) as steps:
        assert generate(llm, prompts[:4], [4], max_tokens=NUM_TOKENS) == expected[:4]
    assert any(len(set(lengths.values())) > 2 for lengths in steps), steps


@pytest.mark.long
def test_references(llm: Any, prompts: Any, expected: Any) -> None:
    """Two requests share one, a third has its own, a fourth none; they come and go. Fails if a reference is another's,
    or is not given back."""
    texts, asked = runner(llm).speculator.lookups.texts, []
    order = [0, 0, 2, 3]
    for i, tokens in zip(order, (expected[0], expected[0], expected[2], None), strict=True):
        options = {} if tokens is None else {"specplugins": {"reference": [*prompts[i][-3:], *tokens]}}
        asked.append(SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=options))
    before = spec_metrics(llm)["accepted_tokens"]
    outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in order], asked, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected[i] for i in order]
    assert spec_metrics(llm)["accepted_tokens"] - before >= 3 * 6
    generate(llm, prompts[:1], [1], max_tokens=2)
    assert texts.num_bytes() == 0 and not texts._taken
