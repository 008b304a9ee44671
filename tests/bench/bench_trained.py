"""Which trained part drafts fastest? All that can be trained for a model, with the same text and like CPU time.

    python tests/bench/bench_trained.py --model examples/demo/model --cache .cache/demo
    python tests/bench/bench_trained.py --cache .cache/plain         # first trains a target without exits, 40 minutes

Trains an exit head, look-ahead embeddings on it, Medusa heads and two jumps, on the standard library; widens the model
and them (examples/demo/widen.py); and has `python -m vllm_specplugins bench` serve them side by side: one request at a
time, at temperatures 0, 0.8 and 1.0, answers of 32 tokens, which hardly loop. What is in the cache is not made again.
At most 6 engines of 1.7 GB are up at once. `--only train` and `--only bench` do one half.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_specplugins.tools.bench.library import is_held_out, library_files

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
NUM_FILES, FILE_CHARACTERS = 150, 20_000
COMMON = "--row-tokens 256 --batch-tokens 2048 --learning-rate 0.002 --device cpu"
# name -> command; the steps are those of about four minutes of one core.
PARTS = {
    "jump": "train-jump --inner-size 1024 --steps 250",
    "exit": "train-exit-head --exit-layer 1 --steps 700",
    "medusa": "train-medusa --steps 350",
    "ahead": "train-look-ahead --exit-layer 1 --exit-head {cache}/exit --steps 250",
    "jump-last": "train-jump --late-layer 7 --inner-size 1024 --steps 220",
}
SAMPLED = {"draft_sample_method": "probabilistic"}
LOOKUP = {"method": "prompt_lookup"}


def methods(wide: Path) -> list[list[dict[str, Any]]]:
    """What is compared, in two groups of engines."""
    exits = {"method": "early_exit", "exit_layer": 1, "exit_head": str(wide / "exit"), **SAMPLED}
    jump, last = ({"method": "jump", "head": str(wide / name), **SAMPLED} for name in ("jump", "jump-last"))
    cascade = {"method": "cascade", "num_speculative_tokens": 4, "policy": "first", "stages": [LOOKUP, jump]}
    medusa = {"method": "medusa", "heads": str(wide / "medusa"), **SAMPLED}
    ahead = {**exits, "look_ahead": str(wide / "ahead")}
    return [
        [with_k(exits, 2), with_k(jump, 3), with_k(LOOKUP, 3), cascade | {"gate": "off"}, cascade | {"policy": "auto"}],
        [with_k(exits, 4), with_k(jump, 4), with_k(last, 4), with_k(medusa, 4), with_k(ahead, 4)],
    ]


def with_k(config: dict[str, Any], num_draft: int) -> dict[str, Any]:
    return {**config, "num_speculative_tokens": num_draft}


def run(*command: str) -> float:
    """Runs a program of this Python to its end; its CPU time in seconds."""
    before = os.times()
    subprocess.run([sys.executable, *command], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def train(model: Path, cache: Path) -> None:
    """The text, the target if it is to be made, and the parts."""
    if not (model / "config.json").exists():
        run(
            str(DEMO / "train.py"),
            "--plain",
            "--minutes",
            "40",
            "--out",
            str(model),
            "--state",
            str(cache / "plain.pt"),
        )
    text = cache / "text.txt"
    if not text.exists():
        texts = [text for source, text in library_files() if not is_held_out(source)]
        step = max(1, len(texts) // NUM_FILES)
        text.write_text("".join(text[:FILE_CHARACTERS] for text in texts[::step][:NUM_FILES]))
    for name, words in PARTS.items():
        if (cache / name / "README.md").exists():
            continue
        command, *options = words.format(cache=cache).split()
        more = [*COMMON.split(), "--data", str(text), "--out", str(cache / name)]
        start = time.perf_counter()
        seconds = run("-m", "vllm_specplugins", command, str(model), *options, *more)
        print(f"{name}: {seconds:.0f} s of CPU time, {time.perf_counter() - start:.0f} s on the clock")


def bench(model: Path, cache: Path, args: argparse.Namespace) -> None:
    """Widens what there is, and serves it."""
    wide = cache / "wide"
    if not wide.exists():
        run(str(DEMO / "widen.py"), str(model), str(wide), "--parts", *(str(cache / name) for name in PARTS))
    for number, configs in enumerate(methods(wide)):
        run(
            "-m", "vllm_specplugins", "bench", "--model", str(wide), "--workloads", "code", "--ignore-eos",
            "--temperature", "0,0.8,1.0", "--prompts", str(args.prompts), "--prompt-tokens", "128",
            "--tokens", "32", "--rounds", str(args.rounds), "--engine-args", '{"num_gpu_blocks_override": 16}',
            "--json", str(cache / f"bench-{number}.json"), "--methods", *map(json.dumps, configs),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: one that is trained without exits, in the cache")
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is trained and widened")
    parser.add_argument("--only", choices=("train", "bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    model = args.model or args.cache / "target"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.only != "bench":
        train(model, args.cache)
    if args.only != "train":
        bench(model, args.cache, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
