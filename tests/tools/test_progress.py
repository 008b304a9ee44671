"""Long work reports its progress if standard error is a file, in every command that may take long."""

import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.progress import Progress

from vllm_specplugins.__main__ import main
from vllm_specplugins.commands import COMMANDS
from vllm_specplugins.tools import progress as module
from vllm_specplugins.tools.progress import line_of, progress

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
SLOW = """
import time
import numpy as np
from vllm_specplugins.draft import Draft

class Slow:
    def __init__(self, options, context): pass
    def observe(self, feedback): pass
    def forget(self, request_ids): pass
    def propose(self, batch):
        time.sleep(0.001)
        return Draft(np.zeros((batch.num_reqs, 0), np.int32), np.zeros(batch.num_reqs, np.int32))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every 10 ms in place of 30 s."""
    monkeypatch.setattr(module, "SECONDS", 0.01)


def wait_for_line(pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    deadline = time.monotonic() + 60
    while not re.search(f"^{pattern}$", capfd.readouterr().err, re.MULTILINE):
        assert time.monotonic() < deadline, pattern
        time.sleep(0.02)


def test_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Kills: silence while nothing advances, a task that is over and still spoken of, and lines after the end."""
    with progress() as bars:
        wait_for_line("working", capfd)
        task = bars.add_task("reading [1/2]", total=4)
        bars.advance(task)
        wait_for_line(r"reading \[1/2\]: 1 of 4, \d+ s so far", capfd)
        bars.update(task, completed=4)
        wait_for_line("working", capfd)
    time.sleep(0.1)
    capfd.readouterr()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_how_long_still() -> None:
    """Kills: an estimate that counts what was done before a run was resumed, and one from steps that take minutes."""
    now = [0.0]
    bars = Progress(disable=True, get_time=lambda: now[0], speed_estimate_period=module.MEMORY_SECONDS)
    task = bars.add_task("training, loss 2.100", total=100)
    assert line_of(bars.tasks[0]) == "training, loss 2.100: 0 of 100, 0 s so far"
    for now[0], done in ((100.0, 51), (200.0, 52), (300.0, 53)):
        bars.update(task, completed=done)
    assert line_of(bars.tasks[0]) == "training, loss 2.100: 53 of 100, 300 s so far, about 4700 s left"


def spoken(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capfd.readouterr().err


def test_training(tiny_model: Path, text_files: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Kills: a training, the text that is scored on, or the scoring itself without a word."""
    arguments = ["train-jump", str(tiny_model), "--dataset-path", *map(str, text_files), "--out", str(tmp_path)]
    words = spoken([*arguments, "--steps", "20", "--row-tokens", "64", "--batch-tokens", "128"], capfd)
    assert re.search(r"^training, loss \d+\.\d+: \d+ of 20, ", words, re.MULTILINE)
    assert "writing text to score on, and scoring, " in words


def test_reading_and_playing(
    text_files: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: `build-store`, `replay` or `check` without a word."""
    store = ["build-store", "--tokenizer", str(DEMO_MODEL), "--dataset-path", *map(str, text_files * 10)]
    assert re.search(
        r"^reading \([\d,]+ tokens so far\), ", spoken([*store, "--out", str(tmp_path / "store")], capfd), re.MULTILINE
    )
    traffic = tmp_path / "trace.jsonl"
    traffic.write_text('{"prompt": [1, 2, 3, 4], "output": [1, 2, 3, 4, 1, 2, 3, 4]}\n' * 50)
    assert re.search(
        r"^prompt_lookup, .*: \d+ of \d+, ", spoken(["replay", "--dataset-path", str(traffic)], capfd), re.MULTILINE
    )
    (tmp_path / "slow_one.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = spoken(["check", "slow_one:Slow"], capfd)
    assert re.search(r"^steps of the recording: \d+ of \d+, ", words, re.MULTILINE)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("doctor", "collect")])
def test_one_way_to_tell(command: str) -> None:
    """Kills: a command with bars of its own, which would be silent in a file."""
    spec = find_spec(COMMANDS[command][0])
    assert spec is not None and spec.origin is not None
    assert re.search(r"with (.+, )?progress\(\) as bars:", Path(spec.origin).read_text())
