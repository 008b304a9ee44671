"""Measures what speculative decoding brings on this machine: real vLLM, real prompts, engines that take turns.

    bash examples/quickstart.sh [options of `python -m vllm_specplugins bench`]

Three engines: no speculation, vLLM's n-gram, and this plugin's prompt_lookup. Without a GPU they take turns if 9 GiB
are free; or else one serves after the other. Without --model they serve the demo model, widened to 217 M parameters:
its outputs at a real model's cost.
Exit status: 0; 1 if an output differs although the engines compute in float32; 2 if something could not be done.
"""

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

from vllm_specplugins.__main__ import main as command_line
from vllm_specplugins.tools.progress import progress

DEMO = Path(__file__).resolve().parent / "demo"
CACHE = DEMO.parents[1] / ".cache" / "quickstart"
OPTIONS = ["--methods", "ngram,prompt_lookup", "--workloads", "copy,code,random", "--prompts", "2", "--tokens", "64"]


def widened_demo_model() -> Path:
    """The demo model at a real model's cost; made once for each state of its weights.

    Raises:
        RuntimeError: it could not be made.
    """
    weights = DEMO / "model" / "model.safetensors"
    wide = CACHE / f"demo-217m-{zlib.crc32(weights.read_bytes()):08x}"
    if not wide.exists():
        partial = CACHE / "unfinished"
        for old in [partial, *CACHE.glob("demo-217m-*")]:
            shutil.rmtree(old, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, DEMO / "widen.py", weights.parent, partial]
        options = ["--hidden-factor=4", "--intermediate=7680", "--depth-factor=1", "--dtype=bfloat16"]
        with progress() as bars:
            bars.add_task("Widening the demo model to 217 M parameters (once)", total=None)
            done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the demo model could not be widened: {done.stderr.strip()}")
        partial.rename(wide)
    return wide


def main() -> int:
    given = sys.argv[1:]
    asked = any(option.split("=")[0] in ("--model", "-h", "--help") for option in given)
    try:
        model = [] if asked else ["--model", str(widened_demo_model())]
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return command_line(["bench", *OPTIONS, *model, *given])


if __name__ == "__main__":
    sys.exit(main())
