"""Engines in separate processes: vLLM's default, and two tensor-parallel ranks on two CPU cores."""

import json
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit
from combinations import PROMPTS, RANKS, Results, results_of
from conftest import ALL, DEMO_MODEL, INTERPRETED, NUM_LAYERS
from parts import medusa, with_embeddings, write_head

pytestmark = pytest.mark.slow
OF_V1_TOO = not INTERPRETED or ALL
HALF = NUM_LAYERS // 2
COUPLED = {"draft_sample_method": "coupled"}
GATED = {
    "method": "cascade",
    "num_speculative_tokens": 4,
    "stages": [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}],
}
FAULTY = {
    **GATED,
    "time_budget_ms": 1000,
    "gate": "off",
    "stages": [
        {"method": "custom", "proposer": "hostile:custom", "options": {"act": "sleeps"}},
        {"method": "early_exit", "exit_layer": 1},
    ],
}
SAMPLES = {"samples": True}
TO_THE_END = {"async_scheduling": False}  # which plans a step too much
OF_STATES = ("look_ahead", "medusa")  # what drafts from states that each rank has
OF_HISTORY = ("prompt_lookup", "suffix_lookup")


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Arguments of LLM by name; trained parts are written to the folder."""
    jump = {**write_head(folder / "jump", HALF, HALF, 0.0), **COUPLED}
    made: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
        "plain": (None, {}),
        "prompt_lookup": (PROMPT_LOOKUP, {**SAMPLES, "switched": True}),
        "all layers": ({**early_exit(NUM_LAYERS), **COUPLED}, {**SAMPLES, **TO_THE_END}),
    }
    if OF_V1_TOO:  # as on V1, and minutes in the interpreter
        made |= {
            "one rank": (PROMPT_LOOKUP, {**SAMPLES, "tensor_parallel_size": 1}),
            "gated": (GATED, {}),
            "medusa": ({**medusa(folder / "medusa"), **COUPLED}, SAMPLES),
        }
    if ALL:  # what all layers, and medusa, show as well
        ahead = {**with_embeddings(folder / "look_ahead", NUM_LAYERS, 4), **COUPLED}
        made |= {"jump": (jump, {**SAMPLES, **TO_THE_END}), "look_ahead": (ahead, SAMPLES)}
        made |= {"suffix_lookup": (SUFFIX_LOOKUP, SAMPLES), "half of the layers": (early_exit(HALF), TO_THE_END)}
        made |= {"waits": (PROMPT_LOOKUP, {"switched": True, **TO_THE_END})}  # for each step's output, on V2, too
    if OF_V1_TOO:
        made["a fault"] = FAULTY, {"ends": "fails"}  # the last, since its engine dies
    model = {"model": str(DEMO_MODEL), **RANKS}
    return {name: {**model, "speculative_config": ungated(config), **more} for name, (config, more) in made.items()}


def ungated(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A method that is alone drafts all it can: on a small model drafts hardly pay."""
    return config if config is None or config["method"] == "cascade" else {"gate": "off", **config}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What became of each run."""
    return results_of("processes.py", runs(tmp_path_factory.mktemp("parts")))


def of(results: Results, name: str) -> dict[str, Any]:
    if name not in results:
        pytest.skip("SPECPLUGINS_TESTS=all: another run shows as much")
    assert results[name]["outputs"] == results["plain"]["outputs"]
    return results[name]


def test_engine_process(results: Results) -> None:
    """VLLM_ENABLE_V1_MULTIPROCESSING=1: configuration and drafts cross the processes."""
    [stats] = of(results, "one rank")["stats"]
    assert stats["accepted_tokens"] > 10


@pytest.mark.parametrize("name", OF_HISTORY if ALL else OF_HISTORY[:2])
def test_two_ranks(results: Results, name: str) -> None:
    """Both ranks verify the same drafts. Kills: on V1 a rank that drafts by itself, on V2 one that drafts otherwise."""
    stats = of(results, name)["stats"]
    assert len(stats) == 2
    assert stats[0]["accepted_tokens"] > 10


@pytest.mark.parametrize("name", ["prompt_lookup", "waits"])
def test_two_ranks_and_the_switch(results: Results, name: str) -> None:
    """specplugins_gate, thrown ten times while requests run. Fails if a request is lost or gets other tokens, if
    anything is drafted while drafting is off, or nothing after it is on again."""
    thrown = of(results, name)["thrown"]
    for answers, expected in zip(thrown["answers"], results["plain"]["outputs"], strict=True):
        assert answers and all(answer == expected for answer in answers)
    assert sum(map(len, thrown["answers"])) == thrown["num_asked"]
    assert thrown["off"] == 0 < thrown["on"], thrown


@pytest.mark.parametrize("name", OF_STATES)
def test_two_ranks_draft_from_states(results: Results, name: str) -> None:
    """Fails if a rank takes its part of the vocabulary for the whole, or draws otherwise than the other one."""
    result = of(results, name)
    assert 0 < result["accepted"] < result["drafted"]
    assert [rank["faults"] for rank in result["stats"]] == [{}, {}]


@pytest.mark.parametrize("name", ["one rank", "all layers", "jump", *OF_STATES])
def test_seeded_requests_say_the_same(results: Results, name: str) -> None:
    """Outputs are equal at temperature 0.9, with any drafts, on one rank and on two. Fails if ranks verify with
    different noise."""
    assert of(results, name)["sampled"] == results["prompt_lookup"]["sampled"]
    assert results["prompt_lookup"]["sampled"] != results["plain"]["outputs"]


def test_two_ranks_gated(results: Results) -> None:
    """Each rank has a gate. Fails if a gate uses the clock of its rank, and therefore drafts differently from the other
    rank."""
    stats = of(results, "gated")["stats"]
    for counted in ("drafted", "kept"):
        assert len({json.dumps([s[counted] for s in rank["stages"].values()]) for rank in stats}) == 1
    assert all(stage["drafted"] for stage in stats[0]["stages"].values())
    assert [rank["faults"] for rank in stats] == [{}, {}]


@pytest.mark.parametrize("name", ["all layers", "jump", *(["half of the layers"] if ALL else [])])
def test_two_ranks_exit_early(results: Results, name: str) -> None:
    """Each rank holds half of the heads and of their KV cache; the jump has exact states. Kills: hidden states or
    logits that are one rank's part of a sum, and ranks that draft different tokens."""
    result = of(results, name)
    drafted, accepted = result["drafted"], result["accepted"]
    assert drafted >= len(PROMPTS) * 16
    assert 0 < accepted < drafted if name == "half of the layers" else accepted == drafted
    assert [rank["faults"] for rank in result["stats"]] == [{}, {}]


def test_two_ranks_and_a_fault_on_one(results: Results) -> None:
    """A custom stage that hangs: rank 0 alone asks it, and both ranks go on. An exit that fails on rank 1 while rank 0
    waits for it in a collective: both ranks stop, at once. Kills: a host stage on each rank, which times out there by
    itself; a fault that rank 1 swallows (a hang of 300 s).
    """
    result = of(results, "a fault")
    custom, exit_stage = zip(*(rank["stages"].values() for rank in result["stats"]), strict=True)
    assert [stage["faults"].keys() for stage in custom] == [{"hangs"}, set()]
    assert custom[0]["drafted"] == custom[1]["drafted"] > 0 and exit_stage[0]["accepted"] == exit_stage[1]["accepted"]
    assert result["steps"][0] > 0 and result["steps"][1] == 0
    assert result["end"] == "EngineDeadError" and result["seconds"] < 150
