"""What runs Triton's kernels, in one process with its interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import RUNS

FILES = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if "@needs_triton" in path.read_text()]


@pytest.mark.skipif(RUNS, reason="is that process")
def test_in_the_interpreter() -> None:
    """Kills: a file with kernels that no process runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, *map(str, FILES)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(FILES) > 6 and " passed" in done.stdout
