"""Engines in processes of their own: vLLM's default, and two tensor-parallel ranks on two CPU cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, TOKEN_RECYCLING, early_exit
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LONG = os.environ.get("SPECPLUGINS_METHODS") == "all"
PROMPTS = [[5, 6, 7, 8] * 8, list(range(30, 70)), [9, 9, 3] * 9]
HALF = NUM_LAYERS // 2
GATED = {
    "method": "cascade",
    "num_speculative_tokens": 4,
    "policy": "first",
    "stages": [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}],
}
FAULTY = {
    **GATED,
    "time_budget_ms": 300,
    "gate": "off",
    "stages": [
        {"method": "custom", "proposer": "hostile:custom", "options": {"act": "sleeps"}},
        {"method": "early_exit", "exit_layer": 1},
    ],
}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, TWO_RANKS),
    "prompt_lookup": (PROMPT_LOOKUP, TWO_RANKS),
    "all layers": (early_exit(NUM_LAYERS), {**TWO_RANKS, "async_scheduling": False}),  # which plans a step too much
}
if not INTERPRETED or os.environ.get("SPECPLUGINS_SIMULATED") == "all":  # as on V1, and minutes in the interpreter
    RUNS |= {"one rank": (PROMPT_LOOKUP, {}), "gated": (GATED, TWO_RANKS)}
if LONG:
    RUNS |= {
        "suffix_lookup": (SUFFIX_LOOKUP, TWO_RANKS),
        "token_recycling": (TOKEN_RECYCLING, TWO_RANKS),
        "half of the layers": (early_exit(HALF), {**TWO_RANKS, "async_scheduling": False}),
    }
if "gated" in RUNS:
    RUNS["a fault"] = FAULTY, TWO_RANKS  # the last, since its engine dies
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What became of each of RUNS."""
    defaults = {"model": str(DEMO_MODEL), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    defaults["disable_log_stats"] = False
    runs = {name: {**defaults, **more, "speculative_config": config} for name, (config, more) in RUNS.items()}
    paths = [str(HERE), str(HERE.parent / "proposers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the program's
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, str(HERE / "processes.py"), json.dumps([PROMPTS, runs])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: Results = dict(map(json.loads, lines))
    assert found.keys() == runs.keys(), done.stderr[-3000:]
    return found


def of(results: Results, name: str) -> dict[str, Any]:
    if name not in results:
        pytest.skip("SPECPLUGINS_SIMULATED=all: as on V1, and minutes through the interpreter")
    assert results[name]["outputs"] == results["plain"]["outputs"]
    return results[name]


def test_engine_process(results: Results) -> None:
    """VLLM_ENABLE_V1_MULTIPROCESSING=1: configuration and drafts cross the processes."""
    [stats] = of(results, "one rank")["stats"]
    assert stats["accepted_tokens"] > 10


@pytest.mark.parametrize("name", ["prompt_lookup", *(["suffix_lookup", "token_recycling"] if LONG else [])])
def test_two_ranks(results: Results, name: str) -> None:
    """Both ranks verify the same drafts. Kills: on V1 a rank that drafts by itself, on V2 one that drafts otherwise."""
    stats = of(results, name)["stats"]
    assert len(stats) == 2
    assert stats[0]["accepted_tokens"] > 10


def test_two_ranks_gated(results: Results) -> None:
    """A gate on each rank. Kills: one that goes by its own clock, and drafts (or not) where the other rank does not."""
    stats = of(results, "gated")["stats"]
    for counted in ("drafted", "kept"):
        assert len({json.dumps([s[counted] for s in rank["stages"].values()]) for rank in stats}) == 1
    assert all(stage["drafted"] for stage in stats[0]["stages"].values())
    assert [rank["faults"] for rank in stats] == [{}, {}]


@pytest.mark.parametrize("name", ["all layers", *(["half of the layers"] if LONG else [])])
def test_two_ranks_exit_early(results: Results, name: str) -> None:
    """Each rank holds half of the heads and of their KV cache. Kills: hidden states or logits that are one rank's part
    of a sum, and ranks that draft different tokens."""
    result = of(results, name)
    drafted, accepted = result["drafted"], result["accepted"]
    assert drafted >= len(PROMPTS) * 16
    assert accepted == drafted if name == "all layers" else 0 < accepted < drafted
    assert [rank["faults"] for rank in result["stats"]] == [{}, {}]


def test_two_ranks_and_a_fault_on_one(results: Results) -> None:
    """A custom stage that hangs: rank 0 alone asks it, and both ranks go on. An exit that fails
    on rank 1 while rank 0 waits for it in a collective: both ranks stop, at once.

    Kills: a host stage on each rank, which times out there by itself; a fault that rank 1 swallows (a hang of 300 s).
    """
    result = of(results, "a fault")
    custom, exit_stage = zip(*(rank["stages"].values() for rank in result["stats"]), strict=True)
    assert [stage["faults"].keys() for stage in custom] == [{"hangs"}, set()]
    assert custom[0]["drafted"] == custom[1]["drafted"] > 0 and exit_stage[0]["accepted"] == exit_stage[1]["accepted"]
    assert result["steps"][0] > 0 and result["steps"][1] == 0
    assert result["end"] == "EngineDeadError" and result["seconds"] < 30
