"""`calibrate` from end to end: real engines, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, RUNNER
from prompts import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="one runner is enough for its arithmetic")]


def test_calibrates_the_demo_model(tmp_path: Path) -> None:
    """Kills: an engine that does not start from here, metrics or counters of another name, costs that are nothing."""
    files = []
    for index, text in enumerate(load_prompts("edit", 3)):
        files.append(tmp_path / f"{index}.txt")
        files[-1].write_text(text)
    options = "--layers 1,4 --prompts 3 --tokens 32 --prompt-tokens 600 --max-draft 4 --dtype float32 --enforce-eager"
    options += " --also prompt_lookup"
    command = [sys.executable, "-m", "vllm_specplugins", "calibrate", DEMO_MODEL, *options.split()]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", "--plot", tmp_path / "out.png", "--data", *files],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "tok/step" in done.stdout and "Traceback" not in done.stderr
    found = json.loads((tmp_path / "out" / "calibration.json").read_text())
    first, middle = found["rows"]
    assert (first["exit_layer"], middle["exit_layer"]) == (1, 4)
    # The demo model is trained for early exits; a bit off by one token matches one time in ten.
    assert 0.3 < first["match_rate"] <= middle["match_rate"] <= 1
    costs = found["costs"]
    assert 0 < first["draft_ms"] < middle["draft_ms"] < 2 * costs["plain_ms"]
    assert costs["layer_ms"] > 0 and set(costs["verify_ms"]) == {"2", "4"}
    for row in found["rows"]:
        assert 1 <= row["prediction"]["tokens_per_step"] <= 5
        assert set(row["prediction"]["by_num_draft"]) == {"1", "2", "3", "4"}
    assert (tmp_path / "out.png").stat().st_size > 10_000
    [lookup] = found["others"]
    assert lookup["name"] == "prompt_lookup" and 0 < lookup["share"] <= 1 and 0 < lookup["accepted"] <= 1
    # Edits repeat their prompt: where steps are not told apart, or drafts not counted, this is 1.
    assert 1.5 < lookup["prediction"]["tokens_per_step"] <= 5
    assert len(list((tmp_path / "out").glob("engine-*.log"))) == 4
