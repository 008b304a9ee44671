"""Engines in processes of their own: vLLM's default, and two tensor-parallel ranks on two CPU cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT_LOOKUP
from conftest import DEMO_MODEL

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    arguments, prompts = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    stats = llm.collective_rpc("specplugins_stats") if arguments.get("speculative_config") else []
    print("RESULT", json.dumps([[list(output.outputs[0].token_ids) for output in outputs], stats]))

if __name__ == "__main__":
    main()
"""
PROMPTS = [[5, 6, 7, 8] * 8, list(range(30, 70)), [9, 9, 3] * 9]


def run(folder: Path, environment: dict[str, str], **arguments: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    defaults = {"model": str(DEMO_MODEL), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    done = subprocess.run(
        [sys.executable, str(program), json.dumps([{**defaults, **arguments}, PROMPTS])],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    outputs, stats = json.loads(lines[0].removeprefix("RESULT "))
    return outputs, stats


@pytest.mark.slow
def test_engine_process(tmp_path: Path) -> None:
    """VLLM_ENABLE_V1_MULTIPROCESSING=1: configuration and drafts cross the processes."""
    plain, _ = run(tmp_path, {})
    outputs, [stats] = run(tmp_path, {}, speculative_config=PROMPT_LOOKUP)
    assert outputs == plain
    assert stats["accepted_tokens"] > 10


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Both ranks verify the same drafts. Kills: a rank that drafts by itself."""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    plain, _ = run(tmp_path, binding, tensor_parallel_size=2)
    outputs, stats = run(tmp_path, binding, tensor_parallel_size=2, speculative_config=PROMPT_LOOKUP)
    assert outputs == plain
    assert len(stats) == 2
    assert stats[0]["accepted_tokens"] > 10
