"""The README's Python, run as a user would; test_verify_lossless.py runs the proposer of write-a-proposer.md."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, RUNNER

PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="what a process reads is the same on both runners")
def test_the_readmes_example(tmp_path: Path) -> None:
    """As it is printed, in a file; only the model has a name, and nothing is compiled, which takes minutes. Kills: an
    example that fails where vLLM starts processes that read the file again, or has no statistics.
    """
    [code] = re.findall(r"```python\n(.*?)```", (PAGE.parents[1] / "README.md").read_text(), re.DOTALL)
    assert code.count('"MODEL"') == 1
    (tmp_path / "example.py").write_text(code.replace('"MODEL"', repr(str(DEMO_MODEL))))
    environment = {name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    eager = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    command = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **eager})
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    [stats] = ast.literal_eval(line)
    assert sum(stats["draft_lengths"]) > 0 and stats["faults"] == {}  # the demo model ends with its first token
