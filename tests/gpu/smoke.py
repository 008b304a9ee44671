"""The tests of test_graph_smoke.py: a line when one begins, and a line when it ends, with the reason if it fails.

    python tests/gpu/smoke.py [PATTERN]     those with names that PATTERN matches

One process runs all. If a test ends the process, or leaves its GPU in an error, another process runs those that follow.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1] / "engine" / "test_graph_smoke.py"
LONGEST = 200  # characters of a reason
SPOILED = re.compile(r"CUDA error|cudaError|HIP error")  # each later call to the GPU fails, too
BEGINS = " begins"


def reasons(report: Any) -> str:
    """The first exception of a failure, and the last one if it is another."""
    chain = getattr(report.longrepr, "chain", None)
    places = [chain[0][1], chain[-1][1]] if chain else []
    first_lines = [str(place.message).strip().partition("\n")[0] for place in places if place]
    return "; then ".join(line[:LONGEST] for line in dict.fromkeys(first_lines or [str(report.longrepr)[-LONGEST:]]))


class Lines:
    """A plugin of pytest. `first`: how many tests earlier processes ran."""

    def __init__(self, pattern: str, first: int, out: Any):
        self._pattern, self._first, self._out, self._began = re.compile(pattern), first, out, 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._pattern.search(item.name)][self._first :]

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.monotonic()
        print(name_of(nodeid) + BEGINS, file=self._out, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        words = f"{name_of(report.nodeid)} {report.outcome} after {time.monotonic() - self._began:.0f} s"
        print(words if report.passed else f"{words}: {reasons(report)}", file=self._out, flush=True)
        if report.failed and SPOILED.search(str(report.longrepr)):
            self._session.shouldstop = "the GPU is in an error"


def name_of(nodeid: str) -> str:
    """
    >>> name_of("tests/engine/test_graph_smoke.py::test_smoke[jump]")
    'jump'
    """
    name = nodeid.rpartition("::")[2]
    return name.removeprefix("test_smoke[").rstrip("]") if name.startswith("test_smoke[") else name


def run_tests(pattern: str, first: int, tests: str) -> int:
    """Runs pytest in this process. Standard output has only the result lines; everything else goes to standard
    error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return int(pytest.main(["-s", "-p", "no:cacheprovider", tests], plugins=[Lines(pattern, first, out)]))


def main(pattern: str = "", tests: str = str(TESTS)) -> int:
    first, has_failed = 0, False
    while True:
        command = [sys.executable, __file__, pattern, tests, str(first)]
        begun, last = 0, ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                begun += line.endswith(f"{BEGINS}\n")
                last = line.strip()
                print(last, flush=True)
        if last.endswith(BEGINS):
            print(f"{last.removesuffix(BEGINS)} ended its process with status {child.returncode}", flush=True)
        first, has_failed = first + begun, has_failed or child.returncode != 0
        if not begun or child.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return int(has_failed)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(run_tests(sys.argv[1], int(sys.argv[3]), sys.argv[2]))
    sys.exit(main(*sys.argv[1:]))
