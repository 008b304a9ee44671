"""A program: checks the names that we use against a vLLM wheel, of which it imports nothing; for a nightly job.

    python tests/engine/newest_vllm.py [VERSION]

Without a version it takes the newest wheel of the package index, pre-releases included. It prints a sentence for each
name that is missing or takes other parameters, and exits with 1 if there is one.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_specplugins.engine.vllm_api import compat

PLATFORM = ("--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12")


def unpack(version: str | None, folder: Path) -> str:
    """Puts the Python files of a version's wheel into a folder, below vllm/. Returns the wheel's name."""
    wanted = ["--pre", "vllm"] if version is None else [f"vllm=={version}"]
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *PLATFORM, "-d", download, *wanted]
        subprocess.run(command, check=True)
        [wheel] = Path(download).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        return wheel.name


def main(version: str | None = None) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "unpacked")
        name = unpack(version, folder)
        problems = list(compat.probe(folder / "vllm"))
    summary = f"{len(problems)} of {sum(map(len, compat.names().values()))} names have changed."
    print("\n".join(f"{name}: {line}" for line in (*problems, summary)))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
