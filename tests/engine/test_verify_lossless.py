"""`verify-lossless` from its command line with real engines; test_distribution.py judges our methods by its cells."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import INTERPRETED
from forked import run

from vllm_specplugins.engine.harness.samples import draw
from vllm_specplugins.tools.lossless.report import PASSED

PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the same program on both runners, and 34 cells through the interpreter")
def test_command(tmp_path: Path) -> None:
    """From the command line to its exit status, with the documentation's proposer: engines in processes of their own.

    Kills: an engine that the user's module does not reach, counts that nobody prints."""
    [code, *_] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_proposer.py").write_text(code)
    config = {"method": "custom", "proposer": "my_proposer:LastSuccessor", "gate": "off", "num_speculative_tokens": 2}
    command = ["-m", "vllm_specplugins", "verify-lossless", "--output-json", tmp_path / "report.json"]
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command += ["--method", json.dumps(config), "--samples", "100"]
    done = run(command, {**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"] and {cell["verdict"] for cell in report["cells"]} == {PASSED}
    assert "Lossless: 34 passed." in done.stdout and "Traceback" not in done.stderr  # which says how far it is


@pytest.mark.parametrize("has_begun", [False, True])
def test_refused_or_failed(has_begun: bool) -> None:
    """Kills: an engine that failed in a step, and would never end the next, taken for one that refuses."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("what is wrong.\nand more")

    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: has_begun)
    llm = SimpleNamespace(generate=generate, get_metrics=list, llm_engine=llm_engine)
    if has_begun:
        with pytest.raises(ValueError, match="what is wrong"):
            draw(llm, [])
    else:
        assert draw(llm, []).refusal == "what is wrong."
