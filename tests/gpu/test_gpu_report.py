"""tests/gpu.sh without a GPU: whatever its programs do, the report has every part, and a summary."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = 18
DRY_RUN = ["bash", str(ROOT / "tests" / "gpu.sh"), "--dry-run"]


def outcomes(report: str) -> dict[str, str]:
    """What the summary says became of each part."""
    rows = re.findall(r"^\| (.+) \| (.+) \| \d+ \|$", report.partition("## Summary")[2], re.MULTILINE)
    return dict(rows)


def test_every_part_is_there(tmp_path: Path) -> None:
    """In a background, where interrupts are ignored. Fails if a part that fails, hangs, ignores its interrupt or prints
    nothing ends the script or another part (`set -e`, no `--kill-after`), or if what it had printed is lost."""
    file = tmp_path / "report.md"
    ignoring = ["bash", "-c", 'trap "" INT; exec "$@"', "-"]
    done = subprocess.run([*ignoring, *DRY_RUN, str(file)], capture_output=True, timeout=60, check=False)
    report = file.read_text()
    found, titles = outcomes(report), re.findall(r"^## (.+)$", report, re.MULTILINE)
    assert done.returncode == 0 and [*found] == titles[:-1] and len(found) == PARTS
    assert found["Default start: qwen3-8b, null"] == "done"
    assert found['Default start: qwen3-8b, {"method": "prompt_lookup"}'] == "out of time after 2 s"
    assert found["Graph smoke"] == "out of time after 2 s" and "FAILED test_smoke[jump]" in report
    assert found["Speed: edit"] == "done, and printed nothing"
    assert found["Speed: chat"] == "exit status 1, and printed nothing"
    forced = "Forced trace: llama-3.1-8b"
    assert found[forced] == "done" and "8 at a time: 2.700 tokens a step; replay 2.690" in report
    assert found[f"{forced}, a head of EAGLE-3's shape"] == "exit status 2" and "an engine failed" in report
    assert found["Identity"] == "exit status 1" and "23 passed, 1 failed in 99 s" in report
    assert "a traceback" in file.with_name("report.md.log").read_text()


def test_a_script_that_is_ended(tmp_path: Path) -> None:
    """Within a program that hangs. Fails if the script waits for it, or if its report has no summary."""
    file = tmp_path / "report.md"
    script = subprocess.Popen([*DRY_RUN, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        if file.exists() and file.read_text().count("## ") == 2:
            break
        time.sleep(0.05)
    time.sleep(0.5)  # for a line of the second program
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 130
    assert [*outcomes(file.read_text()).values()] == ["done", "the script was ended"]
    assert "the first line" in file.read_text()


def test_some_parts(tmp_path: Path) -> None:
    """Fails if others run, too."""
    file = tmp_path / "report.md"
    wanted = {**os.environ, "PARTS": "null|Speed|Identity"}
    subprocess.run([*DRY_RUN, str(file)], env=wanted, capture_output=True, timeout=60, check=True)
    starts = [f"Default start: {shape}, null" for shape in ("qwen3-8b", "llama-3.1-8b")]
    assert [*outcomes(file.read_text())] == [starts[0], "Speed: edit", "Speed: chat", "Identity", starts[1]]
