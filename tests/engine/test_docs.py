"""The documentation's Python, run as a user would: a module that the configuration names, and a program."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER

PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"


def test_the_pages_proposer(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: an example that does not run, drafts nothing, or changes the output."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_proposer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_proposer", raising=False)
    prompts = mixed_prompts(str(DEMO_MODEL), 3)
    expected = generate(engine(), prompts, [12])
    config = {"method": "custom", "proposer": "my_proposer:LastSuccessor", "num_speculative_tokens": 4}
    documented = engine({**config, "options": {"max_tokens": 2}})
    assert generate(documented, prompts, [12]) == expected
    [stats] = documented.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 0
    assert stats["faults"] == {}


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="what a process reads is the same on both runners")
def test_the_readmes_example(tmp_path: Path) -> None:
    """As it is printed, in a file; only the model has a name, and nothing is compiled, which takes minutes.

    Kills: an example that fails where vLLM starts processes that read the file again, or has no statistics.
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
    assert stats["request_steps"] > 0 and stats["faults"] == {}
