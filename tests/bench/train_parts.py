"""Trains parts for a model, for bench_trained.py: an exit head and a jump, in like CPU time.

    python tests/bench/train_parts.py --parts .cache/plain    # and a target without exits, in 40 minutes
    python tests/bench/train_parts.py --parts .cache/demo --model examples/demo/model

The text is the standard library's. What is in --parts is not made again; how long the others took is printed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_specplugins.tools.bench.library import is_held_out, library_files

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
NUM_FILES, FILE_CHARACTERS = 150, 20_000
COMMON = "--row-tokens 256 --batch-tokens 2048 --learning-rate 0.002 --device cpu"
# name -> command; the steps are those of about four minutes of one core.
PARTS = {
    "jump": "train-jump --inner-size 1024 --steps 250",
    "exit1": "train-exit-head --exit-layer 1 --steps 700",
}


def run(*command: str) -> float:
    """Runs a program of this Python to its end; its CPU time in seconds."""
    before = os.times()
    subprocess.run([sys.executable, *command], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def train(args: argparse.Namespace) -> None:
    """The text, the target if it is to be made, and the parts."""
    parts, model = args.parts, str(args.model)
    parts.mkdir(parents=True, exist_ok=True)
    if not (args.model / "config.json").exists():
        run(str(DEMO / "train.py"), "--plain", "--minutes", "40", "--out", model, "--state", str(parts / "plain.pt"))
    text = parts / "text.txt"
    if not text.exists():
        texts = [text for source, text in library_files() if not is_held_out(source)]
        step = max(1, len(texts) // NUM_FILES)
        text.write_text("".join(text[:FILE_CHARACTERS] for text in texts[::step][:NUM_FILES]))
    for name, words in PARTS.items():
        if (parts / name / "README.md").exists():
            continue
        command, *options = words.split()
        more = [*COMMON.split(), "--data", str(text), "--out", str(parts / name)]
        start = time.perf_counter()
        seconds = run("-m", "vllm_specplugins", command, model, *options, *more)
        print(f"{name}: {seconds:.0f} s of CPU time, {time.perf_counter() - start:.0f} s on the clock")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True, help="folder for the parts, one folder each")
    parser.add_argument("--model", type=Path, help="default: one that is trained without exits, in --parts/target")
    args = parser.parse_args()
    args.model = args.model or args.parts / "target"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
