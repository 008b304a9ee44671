"""Engines in processes of their own: vLLM's default, and two tensor-parallel ranks on two CPU cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS

long_on_v2 = pytest.mark.skipif(
    INTERPRETED and os.environ.get("SPECPLUGINS_SIMULATED") != "all",
    reason="SPECPLUGINS_SIMULATED=all: as on V1, and minutes through the interpreter",
)
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    arguments, prompts = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    stats = llm.collective_rpc("specplugins_stats") if arguments.get("speculative_config") else []
    counted = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    counts = [metric.value for name in counted for metric in llm.get_metrics() if metric.name == name]
    print("RESULT", json.dumps([[list(output.outputs[0].token_ids) for output in outputs], stats, counts]))

if __name__ == "__main__":
    main()
"""
LONG = os.environ.get("SPECPLUGINS_METHODS") == "all"
PROMPTS = [[5, 6, 7, 8] * 8, list(range(30, 70)), [9, 9, 3] * 9]


class Result(NamedTuple):
    """What the program prints: outputs, our counters of each rank, vLLM's counts of drafted and accepted tokens."""

    outputs: list[list[int]]
    stats: list[dict[str, Any]]
    counts: list[Any]


def run(folder: Path, environment: dict[str, str], **arguments: Any) -> Result:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    defaults = {
        "model": str(DEMO_MODEL),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    done = subprocess.run(
        [sys.executable, str(program), json.dumps([{**defaults, **arguments}, PROMPTS])],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return Result(*json.loads(lines[0].removeprefix("RESULT ")))


@pytest.mark.slow
@long_on_v2
def test_engine_process(tmp_path: Path) -> None:
    """VLLM_ENABLE_V1_MULTIPROCESSING=1: configuration and drafts cross the processes."""
    plain = run(tmp_path, {})
    drafted = run(tmp_path, {}, speculative_config=PROMPT_LOOKUP)
    assert drafted.outputs == plain.outputs
    [stats] = drafted.stats
    assert stats["accepted_tokens"] > 10


def run_two_ranks(
    folder: Path,
    config: dict[str, Any] | None,
    environment: dict[str, str] = {},  # noqa: B006
    **arguments: Any,
) -> Result:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **environment}
    return run(folder, environment, tensor_parallel_size=2, speculative_config=config, **arguments)


@pytest.fixture(scope="module")
def plain_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_two_ranks(tmp_path_factory.mktemp("plain"), None)


@pytest.mark.slow
@pytest.mark.parametrize("config", [PROMPT_LOOKUP, *([SUFFIX_LOOKUP] if LONG else [])])
def test_two_ranks(tmp_path: Path, plain_two_ranks: Result, config: dict[str, Any]) -> None:
    """Both ranks verify the same drafts. Kills: on V1 a rank that drafts by itself, on V2 one that drafts otherwise."""
    drafted = run_two_ranks(tmp_path, config)
    assert drafted.outputs == plain_two_ranks.outputs
    assert len(drafted.stats) == 2
    assert drafted.stats[0]["accepted_tokens"] > 10


@pytest.mark.slow
@long_on_v2
def test_two_ranks_gated(tmp_path: Path, plain_two_ranks: Result) -> None:
    """A gate on each rank. Kills: one that goes by its own clock, and drafts (or not) where the other rank does not."""
    stages = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
    config = {"method": "cascade", "num_speculative_tokens": 4, "policy": "first", "stages": stages}
    result = run_two_ranks(tmp_path, config)
    assert result.outputs == plain_two_ranks.outputs
    for counted in ("drafted", "kept"):
        assert len({json.dumps([s[counted] for s in rank["stages"].values()]) for rank in result.stats}) == 1
    assert all(stage["drafted"] for stage in result.stats[0]["stages"].values())
    assert [stats["faults"] for stats in result.stats] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [NUM_LAYERS, *([NUM_LAYERS // 2] if LONG else [])])
def test_two_ranks_exit_early(tmp_path: Path, plain_two_ranks: Result, layer: int) -> None:
    """Each rank holds half of the heads and of their KV cache. Kills: hidden states or logits that are one rank's part
    of a sum, and ranks that draft different tokens."""
    result = run_two_ranks(tmp_path, early_exit(layer), async_scheduling=False)  # which would plan a step too much
    assert result.outputs == plain_two_ranks.outputs
    drafted, accepted = result.counts
    assert drafted >= len(PROMPTS) * 16
    assert accepted == drafted if layer == NUM_LAYERS else 0 < accepted < drafted
    assert [stats["faults"] for stats in result.stats] == [{}, {}]


FAULTS_PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams

def asked(worker):
    return worker._barrier.proposer._stages[0].step

def plant(worker):
    def fail(*args):
        raise RuntimeError("planted")

    if worker.rank == 1:
        for name in ("propose", "choose", "go_on"):
            setattr(worker._barrier.proposer._stages[1], name, fail)

def main():
    arguments, prompts = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]
    stats, steps = llm.collective_rpc("specplugins_stats"), llm.collective_rpc(asked)
    llm.collective_rpc(plant)
    start = time.perf_counter()
    try:
        llm.generate(inputs, params, use_tqdm=False)
        end = "lived"
    except Exception as error:
        end = type(error).__name__
    print("RESULT", json.dumps([outputs, stats, [steps, end, time.perf_counter() - start]]), flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@long_on_v2
def test_two_ranks_and_a_fault_on_one(tmp_path: Path, plain_two_ranks: Result, monkeypatch: Any) -> None:
    """A custom stage that hangs: rank 0 alone asks it, and both ranks go on. An exit that fails
    on rank 1 while rank 0 waits for it in a collective: both ranks stop, at once.

    Kills: a host stage on each rank, which times out there by itself; a fault that rank 1 swallows (a hang of 300 s).
    """
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", FAULTS_PROGRAM)
    hostile = {"method": "custom", "proposer": "hostile:custom", "options": {"act": "sleeps"}}
    config = {
        "method": "cascade",
        "num_speculative_tokens": 4,
        "time_budget_ms": 300,
        "policy": "first",
        "gate": "off",
        "stages": [hostile, {"method": "early_exit", "exit_layer": 1}],
    }
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "proposers"), os.environ.get("PYTHONPATH", "")])
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONPATH": paths}
    result = run_two_ranks(tmp_path, config, environment)
    steps, end, seconds = result.counts
    assert result.outputs == plain_two_ranks.outputs
    custom, exit_stage = zip(*(rank["stages"].values() for rank in result.stats), strict=True)
    assert [stage["faults"].keys() for stage in custom] == [{"hangs"}, set()]
    assert custom[0]["drafted"] == custom[1]["drafted"] > 0 and exit_stage[0]["accepted"] == exit_stage[1]["accepted"]
    assert steps[0] > 0 and steps[1] == 0
    assert end == "EngineDeadError" and seconds < 30
