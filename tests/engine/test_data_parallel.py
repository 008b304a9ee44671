"""Two engines of one model, each with a share of the requests: the same tokens as one engine says.

Minutes of processes: SPECPLUGINS_ENGINES=all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import PROMPT_LOOKUP, early_exit
from conftest import DEMO_MODEL, NUM_LAYERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("SPECPLUGINS_ENGINES") != "all", reason="SPECPLUGINS_ENGINES=all: minutes"),
]
PROMPTS = [[5, 6, 7, 8] * 8, list(range(30, 70)), [9, 9, 3] * 9]
BOTH_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# With AsyncLLM, since LLM refuses more than one engine; each request says which one it wants.
PROGRAM = """
import asyncio, json, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def ask(llm, index, prompt, num_engines):
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, detokenize=False)
    rank = index % num_engines if num_engines > 1 else None
    async for output in llm.generate({"prompt_token_ids": prompt}, params, str(index), data_parallel_rank=rank):
        pass
    return list(output.outputs[0].token_ids)

async def main():
    arguments, prompts = json.loads(sys.argv[1])
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    num_engines = arguments.get("data_parallel_size", 1)
    outputs = await asyncio.gather(*(ask(llm, index, prompt, num_engines) for index, prompt in enumerate(prompts)))
    stats = await llm.collective_rpc("specplugins_stats") if arguments.get("speculative_config") else []
    llm.shutdown()
    print("RESULT", json.dumps([outputs, stats]), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


class Result(NamedTuple):
    """What the program prints: outputs, and our counters of the first engine's workers."""

    outputs: list[list[int]]
    stats: list[dict[str, Any]]


def run(folder: Path, environment: dict[str, str], **arguments: Any) -> Result:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    defaults = {"model": str(DEMO_MODEL), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    done = subprocess.run(
        [sys.executable, str(path), json.dumps([{**defaults, **arguments}, PROMPTS])],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return Result(*json.loads(lines[0].removeprefix("RESULT ")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.parametrize("config", [PROMPT_LOOKUP, early_exit(NUM_LAYERS)], ids=lambda config: config["method"])
def test_data_parallel(tmp_path: Path, plain: Result, config: dict[str, Any]) -> None:
    """Two engines of a dense model, each with a share of the requests. Fails if one of them drafts for the other's."""
    result = run(tmp_path, BOTH_CORES, data_parallel_size=2, speculative_config=config)
    assert result.outputs == plain.outputs
    [stats] = result.stats  # vLLM answers with the first engine's
    assert stats["faults"] == {} and stats["accepted_tokens"] > 10
