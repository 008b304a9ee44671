"""`check --engine`: the documentation's proposer in a real engine, on the runner of this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RUNNER

from vllm_specplugins.engine.harness.samples import Drawn
from vllm_specplugins.tools.check.engine import judged

PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"


def check(folder: Path, runner: str) -> subprocess.CompletedProcess[str]:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "my_proposer.py").write_text(code)
    command = [sys.executable, "-m", "vllm_specplugins", "check", "my_proposer:LastSuccessor", "--engine", runner]
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.slow
def test_in_an_engine(tmp_path: Path) -> None:
    """Kills: an engine of the other runner, one that the user's module does not reach, counts that nobody prints."""
    done = check(tmp_path, RUNNER)
    assert done.returncode == 0, done.stderr
    found = re.search(
        rf"In an engine on Model Runner {RUNNER.upper()}: (\d+) tokens drafted, (\d+) accepted", done.stdout
    )
    assert found and int(found[1]) > 0
    assert "Nothing is violated." in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="Triton works there")
def test_no_such_runner(tmp_path: Path) -> None:
    """Kills: V1 in V2's name where Triton does not work."""
    done = check(tmp_path, "v2")
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: check: PROPOSER failed in an engine on Model Runner V2; its log is ")
    assert said.endswith("(Triton has no backend for this device).")


def test_judged() -> None:
    """Kills: an output that differs, or a fault, without a word."""
    drafted = Drawn([[[1]], [[3]]], 4, 1, {"raised": 2})
    words, wrong = judged(Drawn([[[1]], [[2]]]), drafted, "V1")
    assert words == "In an engine on Model Runner V1: 4 tokens drafted, 1 accepted."
    assert [sentence[:12] for sentence in wrong] == ["In an engine", "1 of 2 outpu"] and "raised (2 times)" in wrong[0]
