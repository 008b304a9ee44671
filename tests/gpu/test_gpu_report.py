"""tests/gpu.sh and tests/gpu/offline.sh without a GPU: whatever their programs do, the report has every part, and a
summary; and a smoke test that ends its process or spoils the GPU ends no other one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = 18
DRY_RUN = ["bash", str(ROOT / "tests" / "gpu.sh"), "--dry-run"]


def outcomes(report: str) -> dict[str, str]:
    """Returns the result of each part in the summary."""
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
    assert found["Graph smoke"] == "out of time after 2 s" and "jump failed after 9 s: TypeError: planted" in report
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


def call(number: int, folder: Path, **environment: str) -> tuple[str, list[str]]:
    """The report of a call's dry run, and the names of the files that come back."""
    brought, out = folder / "brought", folder / f"out-{number}"
    brought.mkdir(exist_ok=True)
    (brought / "part-01.tar.xz").touch()
    (brought / "install.sh").write_text('[ "$1" != --finish ] || echo "export PYTHONPATH=$SITE"')
    wanted = {"BROUGHT": str(brought), "SITE": str(folder / "site"), "PYTHON": sys.executable, "MENDED": "jump|tree"}
    command = ["bash", str(ROOT / "tests" / "gpu" / "offline.sh"), str(number), str(out), "--dry-run"]
    (folder / "site").mkdir(exist_ok=True)
    done = subprocess.run(command, env=os.environ | wanted | environment, capture_output=True, timeout=300, text=True)
    assert done.returncode == 0 and "could not" not in done.stdout, done.stderr
    return (out / "report.md").read_text(), sorted(path.name for path in out.iterdir())


def test_the_calls_of_a_machine_without_internet(tmp_path: Path) -> None:
    """From a copy of the package. Fails if a module of it, of vLLM or of the smoke needs a package that the machine
    lacks; if a call has another order, or waits; if more than eight files come back, or a model does."""
    pytest.importorskip("vllm")
    report, files = call(1, tmp_path)
    found = outcomes(report)
    assert [*found] == ["Imports", "Graph smoke", 'Default start: qwen3-8b, {"method": "prompt_lookup"}']
    kinds = re.findall(r"test_smoke\[(.+)\]", report)
    assert found["Imports"] == "done" and kinds[:3] == ["prompt_lookup", "lookup and exit", "lookup and eagle3"]
    assert f"modules are imported, from {tmp_path}" in report
    assert files == ["report.md", "report.md.log"]
    report, files = call(2, tmp_path, PARTS="Forced|Graph")  # without the same imports again
    trace = "Forced trace: llama-3.1-8b"
    parts = [trace, f"{trace}, prompt_lookup alone", "Graph smoke: jump|tree", f"{trace}, 15 drafts"]
    assert [*outcomes(report)] == parts and outcomes(report)[trace].startswith("exit status 2")
    assert "the engine's log" in (tmp_path / "out-2" / "report.md.log").read_text()
    assert files == ["llama-3.1-8b-bench.json", "report.md", "report.md.log"]


KINDS = """
import os, pytest
@pytest.mark.parametrize("kind", ["good", "left out", "bad", "deadly", "spoiling", "last"])
def test_smoke(kind):
    if kind == "bad":
        try:
            {}[[]]
        except TypeError as error:
            raise RuntimeError("the engine failed") from error
    if kind == "deadly":
        os._exit(9)
    assert kind != "spoiling", "CUDA error: an illegal memory access"
"""


def test_a_smoke_test_that_ends_says_why(tmp_path: Path) -> None:
    """Fails if a test has no line or no reason, if one that ends its process, or spoils the GPU, keeps those after it
    from running, or if they run in its process."""
    (tmp_path / "test_kinds.py").write_text(KINDS)
    command = [sys.executable, ROOT / "tests" / "gpu" / "smoke.py", "^(?!.*left)", tmp_path / "test_kinds.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    lines = [re.sub(r" after \d+ s", "", line) for line in done.stdout.splitlines() if not line.endswith(" begins")]
    assert done.returncode == 1 and lines == [
        "good passed",
        "bad failed: TypeError: unhashable type: 'list'; then RuntimeError: the engine failed",
        "deadly ended its process with status 9",
        "spoiling failed: AssertionError: CUDA error: an illegal memory access",
        "last passed",
    ]
    assert done.stderr.count("test session starts") == 3
