"""Engines of one process, as in notebooks: with a method of ours, without, with it again, all of them alive."""

import json
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, RUNNER
from forked import run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="only V1 replaces Triton's kernels")]
PROGRAM = """
import json, sys
import numba  # as a user's own module may
from vllm import LLM, SamplingParams

def answer(config):
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=8)
    return llm.generate(["import os\\nimport sys\\nimport"], params, use_tqdm=False)[0].outputs[0].token_ids

ours = {"method": "prompt_lookup", "num_speculative_tokens": 3}
print(json.dumps([list(answer(config)) for config in (ours, None, ours)]))
"""


def test_without_ours_after_ours(tmp_path: Path) -> None:
    """Kills: a search of vLLM's through all modules that ends at numba's, and with it every later engine."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run([tmp_path / "program.py", DEMO_MODEL])
    assert done.returncode == 0, done.stderr[-2000:]
    ours, none, again = json.loads(done.stdout.splitlines()[-1])
    assert ours == none == again and len(none) == 8
