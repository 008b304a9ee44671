"""Each method of ours, for the tiny models of families.py, and what engines run them with: the cells of the table in
docs/support.md that a run of one engine fills.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from adapters import WITH_ADAPTERS, adapter
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit
from families import EXIT_LAYER, NUM_LAYERS, SHAPE, checkpoint
from parts import medusa, with_embeddings, write_head

HERE = Path(__file__).parent
HIDDEN = SHAPE["hidden_size"]
PROMPTS = [[5, 6, 7, 8] * 8, list(range(30, 70)), [9, 9, 3] * 9]
K = 4
CUSTOM = {  # drafts the newest token again
    "method": "custom",
    "proposer": "hostile:custom",
    "options": {"act": "sleeps", "start": 1 << 30},
    "num_speculative_tokens": K,
}
LOOKUP = {**PROMPT_LOOKUP, "min_ngram": 1}  # random weights repeat little
Results = dict[str, dict[str, Any]]


def cascade(*stages: dict[str, Any]) -> dict[str, Any]:
    own = [{key: value for key, value in stage.items() if key != "num_speculative_tokens"} for stage in stages]
    return {"method": "cascade", "num_speculative_tokens": K, "gate": "off", "stages": own}


def methods(folder: Path) -> dict[str, dict[str, Any]]:
    """By the row of the table; what they are made of is written to the folder."""
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": HIDDEN}
    return {
        "prompt_lookup": LOOKUP,
        "suffix_lookup": SUFFIX_LOOKUP,
        "custom": CUSTOM,
        "early_exit": {**early_exit(EXIT_LAYER), "draft_sample_method": "coupled"},
        "layers": {"method": "early_exit", "layers": [0, *range(2, NUM_LAYERS)], "num_speculative_tokens": K},
        "look_ahead": with_embeddings(folder / "look_ahead", NUM_LAYERS, K, hidden_size=HIDDEN),
        "jump": write_head(folder / "jump", NUM_LAYERS // 2, NUM_LAYERS // 2, 0.0, **sizes),
        "medusa": medusa(folder / "medusa", HIDDEN),
        "cascade": cascade(LOOKUP, early_exit(EXIT_LAYER)),
        "built-in stage": cascade(LOOKUP, {"method": "draft_model", "model": str(checkpoint("llama"))}),
    }


EXITS = (
    "early_exit",
    "layers",
    "look_ahead",
    "jump",
    "medusa",
    "cascade",
)  # what runs layers of the target, or its head
RANKS: dict[str, Any] = {"tensor_parallel_size": 2}


def combinations() -> dict[str, dict[str, Any]]:
    """By the column of the table: arguments of LLM, and of processes.py."""
    llama, experts = ({"model": str(checkpoint(family))} for family in ("llama", "qwen3_moe"))
    return {
        "experts": experts,
        "sliding windows": {"model": str(checkpoint("gemma3"))},
        "LoRA": {**llama, **WITH_ADAPTERS, "adapters": [str(adapter(1)), str(adapter(2))]},
        "TP": {**llama, **RANKS},
        "PP": {**llama, "pipeline_parallel_size": 2},
        "DP": {**llama, "data_parallel_size": 2},
        "DP of experts": {**experts, "data_parallel_size": 2},
        "Ray": {**llama, **RANKS, "distributed_executor_backend": "ray"},
    }


def results_of(
    program: str,
    runs: dict[str, dict[str, Any]],
    environment: dict[str, str] | None = None,
    prompts: list[list[int]] = PROMPTS,
) -> Results:
    """Returns the result of each run of a program such as processes.py. Raises AssertionError with its last output if a
    result is missing.

    Args:
        runs: arguments of LLM, and of processes.py, by name.
        environment: variables beside those that all need.
    """
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "block_size": 32}
    defaults |= {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "disable_log_stats": False}
    defaults |= {"skip_tokenizer_init": True, "speculative_config": None}
    paths = [str(HERE), str(HERE.parent / "isolation"), *filter(None, [os.environ.get("PYTHONPATH")])]
    all_need = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the program's
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    asked = json.dumps([prompts, {name: {**defaults, **arguments} for name, arguments in runs.items()}])
    done = subprocess.run(
        [sys.executable, str(HERE / program), asked],
        capture_output=True,
        text=True,
        timeout=900 + 60 * len(runs),
        env={**os.environ, **all_need, **(environment or {})},
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: Results = dict(map(json.loads, lines))
    words = {name: result["error"] for name, result in found.items() if "error" in result}
    assert found.keys() == runs.keys() and not words, f"{words}\n{done.stderr[-3000:]}"
    return found


def results_on_ray(runs: dict[str, dict[str, Any]]) -> Results:
    """The same of workers on two nodes of Ray's, under an engine in the program's own process, which knows of both; a
    program and nodes for each run, for a second engine waits for the places of the first one's workers."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    environment |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}  # it would share the machine last
    found: Results = {}
    for name, arguments in runs.items():
        found |= results_of("ray_on_cpus.py", {name: arguments}, environment)
    return found
