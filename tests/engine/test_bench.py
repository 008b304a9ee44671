"""`bench` from end to end: real engines, each in a process of its own, that take turns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, RUNNER

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="one runner is enough for its arithmetic")]


def test_benchmarks_the_demo_model(tmp_path: Path) -> None:
    """Kills: an engine that does not start from here, metrics of another name, a clock that runs while others serve,
    requests that are not served together, outputs in another order than their prompts.
    """
    options = (
        "--methods prompt_lookup --workloads copy --batch 1,3 --prompts 3 --tokens 32 --rounds 2 --prompt-tokens 128"
    )
    command = [sys.executable, "-m", "vllm_specplugins", "bench", "--model", DEMO_MODEL, *options.split()]
    files = ["--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.png"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["lossless"] and found["machine"]["dtype"] == "float32"
    rows = {(row["method"], row["cell"]["batch"]): row for row in found["rows"]}
    assert len(rows) == 4
    for (method, _), row in rows.items():
        assert row["num_outputs"] == 6 and row["num_different"] == 0
        assert row["step_ms"] > 0 and row["gap_ms"][0] <= row["gap_ms"][1]
        if method == "none":
            assert row["tokens_per_step"] == 1 and row["coverage"] == 0
            continue
        # It copies: most steps find something, and most of it is right.
        assert 1.2 < row["tokens_per_step"] < 6 and 0.3 < row["coverage"] <= 1 and 0.2 < row["accepted"] <= 1
        product = row["tokens_per_step"] / row["step_cost"]["median"]
        assert row["decoding"]["median"] == pytest.approx(product, rel=0.05)
    single, together = rows["none", 1], rows["none", 3]
    assert together["tokens_per_second"] > 0 and single["first_ms"] > 0
    assert (tmp_path / "bench.png").stat().st_size > 10_000
